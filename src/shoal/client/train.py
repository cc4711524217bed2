"""Local training: the program behind FedAvg, FedProx, fine-tuning and local-only learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from shoal.client.sgd import Sgd, squared_norm
from shoal.errors import UserError
from shoal.models import Model
from shoal.types import FIXED, Batch, Params, Phase, Report, Task, Tree


def cross_entropy(logits: Tensor, b: Batch) -> Tensor:
    """Summed over the real rows of a batch. Written out, because torch's own takes twice the steps when stacked."""
    chosen = F.log_softmax(logits, dim=-1).gather(-1, b.y.unsqueeze(-1)).squeeze(-1)
    return -(chosen * b.w).sum()


@dataclass(frozen=True)
class LocalTraining:
    """Some epochs of SGD on a client's own training data.

    `start` says from which model: the received one, or the client's own (its first weights follow from
    the task's config, so that nothing needs to be sent). `send` and `keep` say what becomes of the
    result: up to the server, or into the client's private tree. `mu` pulls towards the model received:
    mu/2 * |w - w_received|^2 (FedProx). `rows` says which: all, or those of low or of high sensitivity only.
    """

    model: Model
    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    mu: float = 0.0
    rows: Literal["all", "low", "high"] = "all"
    start: Literal["received", "own"] = field(default="received", metadata=FIXED)
    send: bool = field(default=True, metadata=FIXED)
    keep: bool = field(default=False, metadata=FIXED)
    name: str = "train"

    def __post_init__(self) -> None:
        for key, least in (("epochs", 0), ("batch_size", 1)):
            if getattr(self, key) < least:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must be {least} or more")
        for key in ("lr", "momentum", "weight_decay", "clip", "mu"):
            if getattr(self, key) < 0:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must not be negative")

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
        return "train" if self.rows == "all" else f"train/{self.rows}"

    def first(self, task: Task, private: Tree) -> Params:
        if self.start == "received":
            return next(iter(task.models.values()))
        return private["model"] if "model" in private else self.model.init(int(task.config["first"]))

    def begin(self, task: Task, private: Tree) -> Tree:
        model = self.first(task, private)
        device = model[self.model.trainable[0]].device
        return self.start_at(model) | {
            "lr": torch.tensor(task.config.get("lr", self.lr), device=device),
            "loss": torch.zeros(2, device=device),
        }

    def start_at(self, model: Params) -> Tree:
        params = {k: model[k] for k in self.model.trainable}
        s: Tree = {
            "params": params,
            "buffers": {k: v for k, v in model.items() if k not in params},
            "velocity": self.optimiser.init(params),
        }
        return s | ({"anchor": params} if self.mu else {})

    def objective(self, params: Params, s: Tree, b: Batch) -> tuple[Tensor, tuple[Tensor, Params]]:
        logits, buffers = self.model.forward(params | s["buffers"], b.x, b.key)
        total = cross_entropy(logits, b)
        loss = total / b.w.sum().clamp(min=1)
        if self.mu:
            loss = loss + self.mu / 2 * squared_norm({k: p - s["anchor"][k] for k, p in params.items()})
        return loss, (total, buffers)

    def step(self, s: Tree, b: Batch) -> Tree:
        slopes, (total, buffers) = grad(self.objective, has_aux=True)(s["params"], s, b)
        params, velocity = self.optimiser.update(s["params"], slopes, s["velocity"], s["lr"])
        seen = s["loss"] + torch.stack([total, b.w.sum()])
        return s | {"params": params, "velocity": velocity, "buffers": buffers, "loss": seen}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        model = {k: s["params"].get(k, s["buffers"].get(k)) for k in sorted(s["params"] | s["buffers"])}
        total, rows = s["loss"].tolist()
        held = {k: n for k, n in counts.items() if "/" not in k} | {"train": counts[self.split]}
        report = Report({"model": model} if self.send else {}, {"loss": (total, rows)}, held)
        return report, {"model": model} if self.keep else None
