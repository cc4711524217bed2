"""Local training: the client program of FedAvg, FedProx, fine-tuning and local-only learning."""

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
    """Returns the cross-entropy, summed over the real samples of a batch.

    PyTorch's own function needs twice as many operations when models are stacked.
    """
    log_probabilities = F.log_softmax(logits, dim=-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
    return -(log_probabilities * batch.w).sum()


@dataclass(frozen=True)
class LocalTraining(HasOptions):
    """Trains a model with SGD on the client's training samples.

    `start` is the model to start from: the received one, or the personal model. A client without a personal model
    starts from the received one or, if none is sent, from an initial model that follows from a seed in the task's
    config. `sends_model` sends the result to the server, and `keeps_model` keeps it in the private state. `mu` pulls
    towards the received model, or towards the first one if none is sent. `part` selects the trained parameters: all,
    those of the last layer (head), or all others (base). Other parameters do not change. With `part="head"` the
    statistics of batch norm do not change either.
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
        "all",
        "Train on all samples of a client, or only on its samples of low or of high sensitivity. --sensitive-fraction "
        "or --sensitive-column marks the samples of high sensitivity.",
    )
    part: Literal["all", "head", "base"] = "all"
    start: Literal["received", "own"] = "received"
    sends_model: bool = True
    keeps_model: bool = False
    name: str = "train"

    @property
    def optimiser(self) -> Sgd:
        """The optimiser of local training."""
        return Sgd(self.momentum, self.weight_decay, self.clip)

    @property
    def batchable(self) -> bool:
        return self.model.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, self.epochs, self.batch_size, self.step),)

    @property
    def split(self) -> str:
        """The name of the split to train on."""
        return "train" if self.sensitivity == "all" else f"train/{self.sensitivity}"

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The names of the trained parameters."""
        if self.part == "all":
            return self.model.trainable
        return tuple(k for k in self.model.trainable if (k in self.model.head) == (self.part == "head"))

    def begin(self, task: Task, private: Tree) -> Tree:
        personal = private.get("model") if self.start == "own" else None
        received = next(iter(task.models.values())) if task.models else None
        model = personal or received or self.model.init(int(task.config["first"]))
        device = model[self.model.trainable[0]].device
        return self.start_at(model, anchor=received or model) | {
            "lr": torch.tensor(task.config.get("lr", self.lr), device=device),
            "loss": torch.zeros(2, device=device),
        }

    def start_at(self, model: Params, anchor: Params) -> Tree:
        """Returns the state of training that starts from `model` and is pulled towards `anchor`."""
        params = {k: model[k] for k in self.trained_names}
        state: Tree = {
            "params": params,
            "rest": {k: v for k, v in model.items() if k not in params},
            "velocity": self.optimiser.init(params),
        }
        return state | ({"anchor": {k: anchor[k] for k in params}} if self.mu else {})

    def objective(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Params]]:
        """Returns the objective of a batch, its summed loss, and the buffers after the batch."""
        logits, buffers = self.forward_logits(params, state, batch)
        total = cross_entropy(logits, batch)
        return self.add_penalties(total / batch.w.sum().clamp(min=1), logits, params, state, batch), (total, buffers)

    def forward_logits(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, Params]:
        """Returns the logits for the loss of a batch, and the buffers after the batch."""
        return self.model.forward(params | state["rest"], batch.x, batch.key)

    def add_penalties(self, loss: Tensor, logits: Tensor, params: Params, state: Tree, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch plus the penalties that training minimises."""
        if self.mu:
            loss = loss + self.mu / 2 * squared_norm({k: p - state["anchor"][k] for k, p in params.items()})
        return loss

    def step(self, state: Tree, batch: Batch) -> Tree:
        gradients, (total, buffers) = grad(self.objective, has_aux=True)(state["params"], state, batch)
        params, velocity = self.optimiser.update(state["params"], gradients, state["velocity"], state["lr"])
        loss = state["loss"] + torch.stack([total, batch.w.sum()])
        rest = state["rest"] if self.part == "head" else state["rest"] | buffers
        return state | {"params": params, "velocity": velocity, "rest": rest, "loss": loss}

    def current_model(self, state: Tree) -> Params:
        """Returns the model in its present state, with sorted names."""
        return dict(sorted((state["params"] | state["rest"]).items()))

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        model = self.current_model(state)
        total, num_samples = state["loss"].tolist()
        split_counts = {k: n for k, n in counts.items() if "/" not in k} if self.sensitivity == "all" else {}
        sample_counts = split_counts | {"train": counts[self.split]}
        report = Report({"model": model} if self.sends_model else {}, {"loss": (total, num_samples)}, sample_counts)
        return report, {"model": model} if self.keeps_model else None
