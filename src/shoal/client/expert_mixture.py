"""A global model and experts, weighed for each row by a gate of the client's own, each corrected by its prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.client.gate import FitGate, Gate, expert_fingerprint, has_gate_for, has_same_experts
from shoal.client.prior import GLOBAL, PRIOR, logit_correction
from shoal.models import Model
from shoal.types import Params, Phase, Predict, Report, Task, Tree


def model_names(models: Mapping[str, Params]) -> list[str]:
    """The global model, which comes first, and all experts."""
    return [GLOBAL, *sorted(k for k in models if k not in (GLOBAL, PRIOR))]


def expert_models(models: Mapping[str, Params]) -> list[Params]:
    return [models[k] for k in model_names(models)[1:]]


def corrected_logits(model: Model, models: Mapping[str, Params], x: Tensor, prior_corrections: Tensor) -> Tensor:
    """Logits of all models, each with its shift [models, classes]: [rows, models, classes]"""
    return torch.stack([model.predict(models[k], x) for k in model_names(models)], dim=1) + prior_corrections


def logit_corrections(models: Mapping[str, Params], private: Tree, pseudocount: float) -> Tensor | None:
    """Of each model by what it was taught: [models, classes]"""
    found = [logit_correction(models, private, pseudocount, name) for name in model_names(models)]
    return torch.stack([x for x in found if x is not None]) if found[0] is not None else None


@dataclass(frozen=True)
class TrainExpertGate:
    """A client trains a gate over the models that it is served, on its own rows, and keeps it. Models are frozen, and
    corrected by its prior if it knows one and `prior` is set."""

    fit: FitGate
    pseudocount: float
    uses_prior: bool = True
    name: str = "personalise"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.fit.phases(self.model_logits)

    def begin(self, task: Task, private: Tree) -> Tree:
        prior_corrections = logit_corrections(task.models, private, self.pseudocount) if self.uses_prior else None
        none = torch.zeros(len(model_names(task.models)), self.fit.model.num_classes, device=self.fit.model.device)
        state: Tree = {"models": dict(task.models), "shifts": none if prior_corrections is None else prior_corrections}
        return state | self.fit.begin(1 + len(expert_models(task.models)), task.seed)

    def model_logits(self, state: Tree, x: Tensor) -> Tensor:
        return corrected_logits(self.fit.model, state["models"], x, state["shifts"])

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        marks = torch.stack([expert_fingerprint(self.fit.model, m) for m in expert_models(state["models"])])
        return Report(), {"gate": state["gate"], "experts": {"marks": marks}}


def corrected_predict(model: Model, gate: Gate, pseudocount: float, uses_prior: bool = True) -> Predict:
    """Who knows how often its classes occur has this counted in. Experts count for whoever has a gate for them."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        prior_corrections = logit_corrections(models, private, pseudocount) if uses_prior else None
        global_logits = model.predict(models[GLOBAL], x)
        global_logits = global_logits if prior_corrections is None else global_logits + prior_corrections[0]
        experts = expert_models(models)
        if not experts or not has_gate_for(private, experts):
            return global_logits
        logits = corrected_logits(
            model, models, x, torch.zeros_like(global_logits[0]) if prior_corrections is None else prior_corrections
        )
        mixed = gate.mixture_logits(gate.log_weights(gate.scores(private["gate"], x), logits), logits)
        return torch.where(has_same_experts(model, private, experts), mixed, global_logits)

    return predict
