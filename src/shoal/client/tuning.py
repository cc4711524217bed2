"""Fine-tuning tried with several steps and numbers of passes, for validation rows to judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shoal.client.train import LocalTraining
from shoal.client.training_metrics import BATCH_SIZE, hits_and_loss
from shoal.types import Batch, Phase, Report, Task, Tree

VAL = "val"


@dataclass(frozen=True)
class TryTuning:
    """The received model is trained with each of `rates`, on the same rows in the same order. After each number of
    `passes`, which ascend, the client counts hits on its validation rows: [passes, rates]. It tells these and keeps
    nothing."""

    training: LocalTraining
    lr_grid: tuple[float, ...]
    epochs_grid: tuple[int, ...]
    name: str = "tune"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        """A path is walked once for each step: what was there after one pass goes on to the second."""
        found = []
        for place, (before, after) in enumerate(pairwise((0, *self.epochs_grid))):
            if after > before:
                found.append(Phase(self.training.split, after - before, self.training.batch_size, self.step))
            found.append(Phase(VAL, 1, BATCH_SIZE, partial(self.count_hits, place), shuffle=False))
        return tuple(found)

    def begin(self, task: Task, private: Tree) -> Tree:
        tries = [self.training.begin(replace(task, config={"lr": rate}), {}) for rate in self.lr_grid]
        hits = torch.zeros(len(self.epochs_grid), len(self.lr_grid), device=self.training.model.device)
        return {"tries": {str(k): s for k, s in enumerate(tries)}, "hits": hits}

    def step(self, state: Tree, batch: Batch) -> Tree:
        return state | {"tries": {k: self.training.step(one, batch) for k, one in state["tries"].items()}}

    def count_hits(self, index: int, state: Tree, batch: Batch) -> Tree:
        models = [self.training.current_model(one) for one in state["tries"].values()]
        hits = torch.stack([hits_and_loss(self.training.model, model, batch)[0] for model in models])
        here = torch.arange(len(self.epochs_grid), device=hits.device)[:, None] == index
        return state | {"hits": state["hits"] + here * hits}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report({"val": {"hits": state["hits"]}}, {}, {VAL: counts[VAL]}), None


def index_of_most_hits(hits: Tensor) -> tuple[int, int]:
    """The place of the largest of [passes, rates]: of several, that of the fewest passes, then of the smallest step."""
    return divmod(int(hits.flatten().argmax()), hits.shape[1])
