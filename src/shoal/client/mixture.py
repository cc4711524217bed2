"""A global model and experts, weighed for each row by a gate of the client's own, each corrected by its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.client.gate import FitGate, Gate, fits, mark, same
from shoal.client.prior import PRIOR, correction
from shoal.models import Model
from shoal.types import FIXED, Params, Phase, Predict, Report, Task, Tree

GLOBAL = "global"


def said(model: Model, models: Mapping[str, Params], x: Tensor, shift: Tensor) -> Tensor:
    """Corrected logits of the global model, which comes first, and of all experts: [rows, models, classes]"""
    every = [models[GLOBAL], *experts_of(models)]
    return torch.stack([model.predict(m, x) for m in every], dim=1) + shift


def experts_of(models: Mapping[str, Params]) -> list[Params]:
    return [models[k] for k in sorted(models) if k not in (GLOBAL, PRIOR)]


@dataclass(frozen=True)
class WeighModels:
    """A client trains a gate over the models that it is served, on its own rows, and keeps it. Models are frozen, and
    corrected by its prior if it knows one and `prior` is set."""

    fit: FitGate
    alpha: float
    prior: bool = True
    name: str = "personalise"
    batchable: bool = field(default=True, metadata=FIXED)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.fit.phases(self.say)

    def begin(self, task: Task, private: Tree) -> Tree:
        shift = correction(task.models, private, self.alpha) if self.prior else None
        none = torch.zeros(self.fit.model.classes, device=self.fit.model.device)
        s: Tree = {"models": dict(task.models), "private": private, "shift": none if shift is None else shift}
        return s | self.fit.begin(1 + len(experts_of(task.models)), task.seed)

    def say(self, s: Tree, x: Tensor) -> Tensor:
        return said(self.fit.model, s["models"], x, s["shift"])

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        marks = torch.stack([mark(self.fit.model, m) for m in experts_of(s["models"])])
        return Report(), s["private"] | {"gate": s["gate"], "experts": {"marks": marks}}


def corrected_predict(model: Model, gate: Gate, alpha: float, prior: bool = True) -> Predict:
    """Who knows how often its classes occur has this counted in. Experts count for whoever has a gate for them."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        shift = correction(models, private, alpha) if prior else None
        alone = model.predict(models[GLOBAL], x)
        alone = alone if shift is None else alone + shift
        experts = experts_of(models)
        if not experts or not fits(private, experts):
            return alone
        logits = said(model, models, x, torch.zeros_like(alone[0]) if shift is None else shift)
        mixed = gate.mixed(gate.log_weights(gate.scores(private["gate"], x), logits), logits)
        return torch.where(same(model, private, experts), mixed, alone)

    return predict
