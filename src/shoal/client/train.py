"""Local training: the program behind FedAvg, FedProx, fine-tuning and local-only learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from shoal.client.sgd import Sgd, squared_norm
from shoal.models import Model
from shoal.types import Batch, HasOptions, Params, Phase, Report, Task, Tree, option


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Summed over the real rows of a batch. Written out, because torch's own takes twice the steps when stacked."""
    chosen = F.log_softmax(logits, dim=-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
    return -(chosen * batch.w).sum()


@dataclass(frozen=True)
class LocalTraining(HasOptions):
    """Some epochs of SGD on a client's own training data.

    `start` says from which model: the received one, or the client's own, which at first is the received one too (where
    none is sent, it follows from a seed in the task's config). `send` and `keep` say what becomes of the result: up to
    the server, or into the client's private tree. `mu` pulls towards the model received, where none is sent towards
    the first: mu/2 * |w - w_received|^2 (FedProx). `rows` says which: all, or those of low or of high sensitivity
    only. `part` says which parameters: all, those of the last layer, or all others. What is not trained stays as it
    is, and so do batch norm's statistics with all that is below the last layer.
    """

    model: Model
    epochs: int = option(1, "Train for this many epochs on the client's samples. 0 leaves the model unchanged.", ge=0)
    batch_size: int = option(32, "Each step of local SGD uses this many samples.", ge=1)
    lr: float = option(0.1, "Multiply the gradient by this learning rate in each step of local SGD.", ge=0)
    momentum: float = option(
        0.0,
        "Keep this fraction of the velocity from one step of local SGD to the next. 0 turns momentum off.",
        ge=0,
        lt=1,
    )
    weight_decay: float = option(
        0.0, "Add this multiple of the weights to the gradient, as PyTorch's SGD does. 0 turns weight decay off.", ge=0
    )
    clip: float = option(
        0.0, "Scale the gradient of all parameters down to this L2 norm if it is longer. 0 turns clipping off.", ge=0
    )
    mu: float = option(
        0.0,
        "Add mu/2 times the squared distance from the received model to the loss of each batch (FedProx). "
        "0 turns this pull off.",
        ge=0,
    )
    sensitivity: Literal["all", "low", "high"] = option(
        "all", "Train on all samples of a client, or only on its samples of low or of high sensitivity."
    )
    part: Literal["all", "head", "base"] = "all"
    start: Literal["received", "own"] = "received"
    sends_model: bool = True
    keeps_model: bool = False
    name: str = "train"

    @property
    def optimiser(self) -> Sgd:
        return Sgd(self.momentum, self.weight_decay, self.clip)

    @property
    def batchable(self) -> bool:
        return self.model.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, self.epochs, self.batch_size, self.step),)

    @property
    def split(self) -> str:
        return "train" if self.sensitivity == "all" else f"train/{self.sensitivity}"

    @property
    def trained_names(self) -> tuple[str, ...]:
        if self.part == "all":
            return self.model.trainable
        return tuple(k for k in self.model.trainable if (k in self.model.head) == (self.part == "head"))

    def begin(self, task: Task, private: Tree) -> Tree:
        own = private.get("model") if self.start == "own" else None
        received = next(iter(task.models.values())) if task.models else None
        model = own or received or self.model.init(int(task.config["first"]))
        device = model[self.model.trainable[0]].device
        return self.start_at(model, anchor=received or model) | {
            "lr": torch.tensor(task.config.get("lr", self.lr), device=device),
            "loss": torch.zeros(2, device=device),
        }

    def start_at(self, model: Params, anchor: Params) -> Tree:
        params = {k: model[k] for k in self.trained_names}
        state: Tree = {
            "params": params,
            "rest": {k: v for k, v in model.items() if k not in params},
            "velocity": self.optimiser.init(params),
        }
        return state | ({"anchor": {k: anchor[k] for k in params}} if self.mu else {})

    def objective(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Params]]:
        logits, buffers = self.forward_logits(params, state, batch)
        total = cross_entropy(logits, batch)
        return self.add_penalties(total / batch.w.sum().clamp(min=1), logits, params, state, batch), (total, buffers)

    def forward_logits(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, Params]:
        """The logits whose loss is made small, and the buffers after this batch."""
        return self.model.forward(params | state["rest"], batch.x, batch.key)

    def add_penalties(self, loss: Tensor, logits: Tensor, params: Params, state: Tree, batch: Batch) -> Tensor:
        """The mean loss of a batch, and what else is made small."""
        if self.mu:
            loss = loss + self.mu / 2 * squared_norm({k: p - state["anchor"][k] for k, p in params.items()})
        return loss

    def step(self, state: Tree, batch: Batch) -> Tree:
        gradients, (total, buffers) = grad(self.objective, has_aux=True)(state["params"], state, batch)
        params, velocity = self.optimiser.update(state["params"], gradients, state["velocity"], state["lr"])
        seen = state["loss"] + torch.stack([total, batch.w.sum()])
        rest = state["rest"] if self.part == "head" else state["rest"] | buffers
        return state | {"params": params, "velocity": velocity, "rest": rest, "loss": seen}

    def current_model(self, state: Tree) -> Params:
        """The model as it is now, by sorted names."""
        return dict(sorted((state["params"] | state["rest"]).items()))

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        model = self.current_model(state)
        total, num_samples = state["loss"].tolist()
        split_counts = {k: n for k, n in counts.items() if "/" not in k} if self.sensitivity == "all" else {}
        sample_counts = split_counts | {"train": counts[self.split]}
        report = Report({"model": model} if self.sends_model else {}, {"loss": (total, num_samples)}, sample_counts)
        return report, {"model": model} if self.keeps_model else None
