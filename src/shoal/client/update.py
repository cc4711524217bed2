"""What a client makes of a new global model: it takes it over, or keeps some of its own (APCSMA, Eq. 16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shoal.models import Model
from shoal.types import FIXED, Batch, Params, Phase, Report, Task, Tree


@dataclass(frozen=True)
class ConditionalUpdate:
    """Where the client's own model has more hits than the received one, it is mixed into it by the config's "kappa";
    else the received one takes its place. Both are compared on the client's validation or training rows."""

    model: Model
    judge: Literal["val", "train"] = "val"
    name: str = "update"
    batchable: bool = field(default=True, metadata=FIXED)  # as served, a row is its own affair

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.judge, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        hits = torch.zeros(2, device=self.model.device)
        return {"received": received, "own": private.get("model", received), "hits": hits}

    def step(self, s: Tree, b: Batch) -> Tree:
        guessed = torch.stack([self.model.predict(s[k], b.x).argmax(-1) for k in ("own", "received")])
        return s | {"hits": s["hits"] + ((guessed == b.y) * b.w).sum(-1)}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        better = s["hits"][0] > s["hits"][1]
        model = mixed(s["received"], s["own"], task.config["kappa"], better)
        return Report(metrics={"kept": (float(better), 1.0)}), {"model": model}


def mixed(received: Params, own: Params, kappa: float, better: Tensor) -> Params:
    """Eq. 16. Whole numbers (batch counters) are the received ones."""
    return {
        k: torch.where(better, (1 - kappa) * x + kappa * own[k], x) if x.is_floating_point() else x
        for k, x in received.items()
    }
