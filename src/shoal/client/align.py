"""Local training that is pulled towards the direction of the last global update (FedCos)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client.sgd import squared_norm
from shoal.client.train import LocalTraining
from shoal.types import Batch, Params, Task, Tree, option

EPS = 1e-4  # added to the product of squared lengths, as in the authors' code: the first local update has length 0


@dataclass(frozen=True)
class AlignedTraining(LocalTraining):
    """Adds `cosine` times 1 - cos(w - w_received, direction) to the loss of each batch.

    The direction of the last global update is a second model of the task. Without it training is plain local training.
    """

    cosine: float = option(
        0.02,
        "Add this multiple of 1 - cos(local update, last global update) to the loss of each batch. 0 turns it off.",
        ge=0,
    )

    def begin(self, task: Task, private: Tree) -> Tree:
        received = task.models["global"]
        state = super().begin(replace(task, models={"global": received}), private)
        if "direction" not in task.models or not self.cosine:
            return state
        direction = {k: task.models["direction"][k] for k in state["params"]}
        return state | {"direction": direction, "anchor": {k: received[k] for k in state["params"]}}

    def add_penalties(self, loss: Tensor, logits: Tensor, params: Params, state: Tree, batch: Batch) -> Tensor:
        loss = super().add_penalties(loss, logits, params, state, batch)
        if "direction" not in state:
            return loss
        local_update = {k: p - state["anchor"][k] for k, p in params.items()}
        return loss + self.cosine * (1 - cosine(local_update, state["direction"]))


def cosine(a: Params, b: Params) -> Tensor:
    """Returns the cosine between two models as vectors; 0 if one of them is 0."""
    product = torch.stack([(x * b[k]).sum() for k, x in a.items()]).sum()
    return product / (squared_norm(a) * squared_norm(b) + EPS).sqrt()
