"""What a client makes of a new global model: it takes it over, or keeps some of its own (APCSMA, Eq. 16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.models import Model
from shoal.types import Batch, Params, Phase, Report, Task, Tree, option


@dataclass(frozen=True)
class ConditionalUpdate:
    """Where the client's own model has more hits than the received one, it is mixed into it by the config's "kappa";
    else the received one takes its place. Both are compared on the client's validation or training rows, or on those of
    one sensitivity; who has none of them takes the received one. A model that has become no number hits nothing."""

    model: Model
    judge: Literal["val", "train"] = option(
        "val",
        "Compare the personal and the received model on the client's validation samples (val) or on its training "
        "samples (train).",
        value_without_validation="train",
    )
    rows: Literal["all", "low", "high"] = "all"  # as the client trains on
    name: str = "update"
    batchable: bool = True  # as served, a row is its own affair

    @property
    def split(self) -> str:
        return self.judge if self.rows == "all" else f"{self.judge}/{self.rows}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        hits = torch.zeros(2, device=self.model.device)
        return {"received": received, "own": private.get("model", received), "hits": hits}

    def step(self, s: Tree, b: Batch) -> Tree:
        logits = torch.stack([self.model.predict(s[k], b.x) for k in ("own", "received")])
        right = (logits.argmax(-1) == b.y) & logits.isfinite().all(-1)  # of NaNs the first class would be the largest
        return s | {"hits": s["hits"] + (right * b.w).sum(-1)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        better = state["hits"][0] > state["hits"][1]
        model = mixed(state["received"], state["own"], task.config["kappa"], better)
        return Report(metrics={"kept": (float(better), float(counts[self.split] > 0))}), {"model": model}


def mixed(received: Params, own: Params, kappa: float, better: Tensor) -> Params:
    """Eq. 16. Whole numbers (batch counters) are the received ones."""
    return {
        k: torch.where(better, (1 - kappa) * x + kappa * own[k], x) if x.is_floating_point() else x
        for k, x in received.items()
    }
