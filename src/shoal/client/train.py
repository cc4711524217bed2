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

    `start` says from which model: the received one, or the client's own, which at first is the received one too (where
    none is sent, it follows from a seed in the task's config). `send` and `keep` say what becomes of the result: up to
    the server, or into the client's private tree. `mu` pulls towards the model received, where none is sent towards
    the first: mu/2 * |w - w_received|^2 (FedProx). `rows` says which: all, or those of low or of high sensitivity
    only. `part` says which parameters: all, those of the last layer, or all others. What is not trained stays as it
    is, and so do batch norm's statistics with all that is below the last layer.
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
    part: Literal["all", "head", "base"] = field(default="all", metadata=FIXED)
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

    @property
    def trained(self) -> tuple[str, ...]:
        if self.part == "all":
            return self.model.trainable
        return tuple(k for k in self.model.trainable if (k in self.model.head) == (self.part == "head"))

    def begin(self, task: Task, private: Tree) -> Tree:
        own = private.get("model") if self.start == "own" else None
        received = next(iter(task.models.values())) if task.models else None
        model = own or received or self.model.init(int(task.config["first"]))
        device = model[self.model.trainable[0]].device
        return self.start_at(model, towards=received or model) | {
            "lr": torch.tensor(task.config.get("lr", self.lr), device=device),
            "loss": torch.zeros(2, device=device),
        }

    def start_at(self, model: Params, towards: Params) -> Tree:
        params = {k: model[k] for k in self.trained}
        s: Tree = {
            "params": params,
            "rest": {k: v for k, v in model.items() if k not in params},
            "velocity": self.optimiser.init(params),
        }
        return s | ({"anchor": {k: towards[k] for k in params}} if self.mu else {})

    def objective(self, params: Params, s: Tree, b: Batch) -> tuple[Tensor, tuple[Tensor, Params]]:
        logits, buffers = self.said(params, s, b)
        total = cross_entropy(logits, b)
        return self.penalised(total / b.w.sum().clamp(min=1), logits, params, s, b), (total, buffers)

    def said(self, params: Params, s: Tree, b: Batch) -> tuple[Tensor, Params]:
        """The logits whose loss is made small, and the buffers after this batch."""
        return self.model.forward(params | s["rest"], b.x, b.key)

    def penalised(self, loss: Tensor, logits: Tensor, params: Params, s: Tree, b: Batch) -> Tensor:
        """The mean loss of a batch, and what else is made small."""
        if self.mu:
            loss = loss + self.mu / 2 * squared_norm({k: p - s["anchor"][k] for k, p in params.items()})
        return loss

    def step(self, s: Tree, b: Batch) -> Tree:
        slopes, (total, buffers) = grad(self.objective, has_aux=True)(s["params"], s, b)
        params, velocity = self.optimiser.update(s["params"], slopes, s["velocity"], s["lr"])
        seen = s["loss"] + torch.stack([total, b.w.sum()])
        rest = s["rest"] if self.part == "head" else s["rest"] | buffers
        return s | {"params": params, "velocity": velocity, "rest": rest, "loss": seen}

    def whole(self, s: Tree) -> Params:
        """The model as it is now, by sorted names."""
        return dict(sorted((s["params"] | s["rest"]).items()))

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        model = self.whole(s)
        total, rows = s["loss"].tolist()
        whole = {k: n for k, n in counts.items() if "/" not in k} if self.rows == "all" else {}
        held = whole | {"train": counts[self.split]}
        report = Report({"model": model} if self.send else {}, {"loss": (total, rows)}, held)
        return report, {"model": model} if self.keep else None
