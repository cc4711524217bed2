"""A global model and experts, mixed by the client's gate, each with a prior correction of its logits.

The gate itself is in `gate`, the prior correction in `prior`.
"""

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
    """Returns the name of the global model, which comes first, and the names of all experts."""
    return [GLOBAL, *sorted(k for k in models if k not in (GLOBAL, PRIOR))]


def expert_models(models: Mapping[str, Params]) -> list[Params]:
    """Returns all experts in the order of their names."""
    return [models[k] for k in model_names(models)[1:]]


def corrected_logits(model: Model, models: Mapping[str, Params], x: Tensor, prior_corrections: Tensor) -> Tensor:
    """Returns the logits of all models plus their corrections [models, classes]: [samples, models, classes]."""
    return torch.stack([model.predict(models[k], x) for k in model_names(models)], dim=1) + prior_corrections


def logit_corrections(models: Mapping[str, Params], private: Tree, pseudocount: float) -> Tensor | None:
    """Returns the prior correction of each model [models, classes], or None without label counts."""
    corrections = [logit_correction(models, private, pseudocount, name) for name in model_names(models)]
    return torch.stack([x for x in corrections if x is not None]) if corrections[0] is not None else None


@dataclass(frozen=True)
class TrainExpertGate:
    """Trains the client's gate over the frozen models that it is served, and keeps the gate in the private state.

    With `uses_prior` the models' logits are corrected by the client's class prior, if the client has one.
    """

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
        if prior_corrections is None:
            shape = len(model_names(task.models)), self.fit.model.num_classes
            prior_corrections = torch.zeros(*shape, device=self.fit.model.device)
        state: Tree = {"models": dict(task.models), "prior_corrections": prior_corrections}
        return state | self.fit.begin(1 + len(expert_models(task.models)), task.seed)

    def model_logits(self, state: Tree, x: Tensor) -> Tensor:
        """Returns the corrected logits of all models: [samples, models, classes]."""
        return corrected_logits(self.fit.model, state["models"], x, state["prior_corrections"])

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        fingerprints = torch.stack([expert_fingerprint(self.fit.model, m) for m in expert_models(state["models"])])
        return Report(), {"gate": state["gate"], "experts": {"marks": fingerprints}}


def corrected_predict(model: Model, gate: Gate, pseudocount: float, uses_prior: bool = True) -> Predict:
    """Returns the function that predicts with the global model, or with the mixture if the client has a gate for it.

    Logits are corrected by the client's class prior, if the client has one and `uses_prior` is True.
    """

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
