"""A global model and experts, weighed for each row by a gate of the client's own, each corrected by its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.client.gate import FitGate, Gate, fits, mark, same
from shoal.client.prior import GLOBAL, PRIOR, correction
from shoal.models import Model
from shoal.types import Params, Phase, Predict, Report, Task, Tree


def names_of(models: Mapping[str, Params]) -> list[str]:
    """The global model, which comes first, and all experts."""
    return [GLOBAL, *sorted(k for k in models if k not in (GLOBAL, PRIOR))]


def experts_of(models: Mapping[str, Params]) -> list[Params]:
    return [models[k] for k in names_of(models)[1:]]


def said(model: Model, models: Mapping[str, Params], x: Tensor, shifts: Tensor) -> Tensor:
    """Logits of all models, each with its shift [models, classes]: [rows, models, classes]"""
    return torch.stack([model.predict(models[k], x) for k in names_of(models)], dim=1) + shifts


def corrections(models: Mapping[str, Params], private: Tree, alpha: float) -> Tensor | None:
    """Of each model by what it was taught: [models, classes]"""
    found = [correction(models, private, alpha, name) for name in names_of(models)]
    return torch.stack([x for x in found if x is not None]) if found[0] is not None else None


@dataclass(frozen=True)
class WeighModels:
    """A client trains a gate over the models that it is served, on its own rows, and keeps it. Models are frozen, and
    corrected by its prior if it knows one and `prior` is set."""

    fit: FitGate
    alpha: float
    prior: bool = True
    name: str = "personalise"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.fit.phases(self.say)

    def begin(self, task: Task, private: Tree) -> Tree:
        shifts = corrections(task.models, private, self.alpha) if self.prior else None
        none = torch.zeros(len(names_of(task.models)), self.fit.model.num_classes, device=self.fit.model.device)
        s: Tree = {"models": dict(task.models), "shifts": none if shifts is None else shifts}
        return s | self.fit.begin(1 + len(experts_of(task.models)), task.seed)

    def say(self, s: Tree, x: Tensor) -> Tensor:
        return said(self.fit.model, s["models"], x, s["shifts"])

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        marks = torch.stack([mark(self.fit.model, m) for m in experts_of(state["models"])])
        return Report(), {"gate": state["gate"], "experts": {"marks": marks}}


def corrected_predict(model: Model, gate: Gate, alpha: float, prior: bool = True) -> Predict:
    """Who knows how often its classes occur has this counted in. Experts count for whoever has a gate for them."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        shifts = corrections(models, private, alpha) if prior else None
        alone = model.predict(models[GLOBAL], x)
        alone = alone if shifts is None else alone + shifts[0]
        experts = experts_of(models)
        if not experts or not fits(private, experts):
            return alone
        logits = said(model, models, x, torch.zeros_like(alone[0]) if shifts is None else shifts)
        mixed = gate.mixed(gate.log_weights(gate.scores(private["gate"], x), logits), logits)
        return torch.where(same(model, private, experts), mixed, alone)

    return predict
