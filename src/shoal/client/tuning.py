"""Grid search for fine-tuning: learning rates and numbers of epochs, compared on validation samples."""

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
    """Trains the received model with each learning rate of `lr_grid` on the same batches and reports validation hits.

    After each number of epochs of `epochs_grid`, which ascend, the client counts hits on its validation samples. The
    report has these counts [epochs, learning rates]. Nothing is kept.
    """

    training: LocalTraining
    lr_grid: tuple[float, ...]
    epochs_grid: tuple[int, ...]
    name: str = "tune"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in which training continues from one number of epochs to the next."""
        phases = []
        for index, (before, after) in enumerate(pairwise((0, *self.epochs_grid))):
            if after > before:
                phases.append(Phase(self.training.split, after - before, self.training.batch_size, self.step))
            phases.append(Phase(VAL, 1, BATCH_SIZE, partial(self.count_hits, index), shuffle=False))
        return tuple(phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        states = [self.training.begin(replace(task, config={"lr": lr}), {}) for lr in self.lr_grid]
        hits = torch.zeros(len(self.epochs_grid), len(self.lr_grid), device=self.training.model.device)
        return {"states": {str(k): model_state for k, model_state in enumerate(states)}, "hits": hits}

    def step(self, state: Tree, batch: Batch) -> Tree:
        states = {k: self.training.step(model_state, batch) for k, model_state in state["states"].items()}
        return state | {"states": states}

    def count_hits(self, index: int, state: Tree, batch: Batch) -> Tree:
        """Returns the state with the hits of a validation batch added to row `index`."""
        models = [self.training.current_model(model_state) for model_state in state["states"].values()]
        hits = torch.stack([hits_and_loss(self.training.model, model, batch)[0] for model in models])
        is_index = torch.arange(len(self.epochs_grid), device=hits.device)[:, None] == index
        return state | {"hits": state["hits"] + is_index * hits}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report({"val": {"hits": state["hits"]}}, {}, {VAL: counts[VAL]}), None


def index_of_most_hits(hits: Tensor) -> tuple[int, int]:
    """Returns both indices of the most hits; of equals, the fewest epochs and then the first learning rate."""
    return divmod(int(hits.flatten().argmax()), hits.shape[1])
