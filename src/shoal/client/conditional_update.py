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
    validation_split: Literal["val", "train"] = option(
        "val",
        "Compare the personal and the received model on the client's validation samples (val) or on its training "
        "samples (train).",
        value_without_validation="train",
    )
    sensitivity: Literal["all", "low", "high"] = "all"  # as the client trains on
    name: str = "update"
    batchable: bool = True  # as served, a row is its own affair

    @property
    def split(self) -> str:
        return self.validation_split if self.sensitivity == "all" else f"{self.validation_split}/{self.sensitivity}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        hits = torch.zeros(2, device=self.model.device)
        return {"received": received, "own": private.get("model", received), "hits": hits}

    def step(self, state: Tree, batch: Batch) -> Tree:
        logits = torch.stack([self.model.predict(state[k], batch.x) for k in ("own", "received")])
        right = (logits.argmax(-1) == batch.y) & logits.isfinite().all(
            -1
        )  # of NaNs the first class would be the largest
        return state | {"hits": state["hits"] + (right * batch.w).sum(-1)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        is_personal_better = state["hits"][0] > state["hits"][1]
        model = mix_models(state["received"], state["own"], task.config["kappa"], is_personal_better)
        return Report(metrics={"kept": (float(is_personal_better), float(counts[self.split] > 0))}), {"model": model}


def mix_models(received: Params, personal: Params, kappa: float, is_personal_better: Tensor) -> Params:
    """Eq. 16. Whole numbers (batch counters) are the received ones."""
    return {
        k: torch.where(is_personal_better, (1 - kappa) * x + kappa * personal[k], x) if x.is_floating_point() else x
        for k, x in received.items()
    }
