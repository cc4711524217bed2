"""Training that is asked to go the way that the global model went last (FedCos)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client.sgd import squared_norm
from shoal.client.train import LocalTraining
from shoal.types import Batch, Params, Task, Tree, option

EPS = 1e-4  # of the squared lengths' product, as in the authors' program: at the start there is no way gone yet


@dataclass(frozen=True)
class AlignedTraining(LocalTraining):
    """Adds `cosine` times 1 - cos(w - w_received, direction) to the loss of each batch, where the task has such a
    direction beside the model."""

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
    inner = torch.stack([(x * b[k]).sum() for k, x in a.items()]).sum()
    return inner / (squared_norm(a) * squared_norm(b) + EPS).sqrt()
