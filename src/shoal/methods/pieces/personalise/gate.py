"""A gate over experts, as in SCMoE-PFL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.client.expert_mixture import TrainExpertGate, corrected_predict
from shoal.client.gate import FitGate, Gate, TrainGate, gated_predict
from shoal.client.model_choice import ChooseModel
from shoal.client.personal_models import TrainSharedAndPersonal
from shoal.client.train import LocalTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLASS_PRIOR,
    EXPERTS,
    EXPERTS_BESIDE_GLOBAL,
    OVERLAPPING_CLUSTERS,
    PERSONAL_MODEL,
    SERVED_MODEL_PREDICTIONS,
)
from shoal.methods.composition.label_prior import prior_pseudocount
from shoal.methods.composition.piece import Piece, register
from shoal.stages.global_and_experts import PersonaliseMembers
from shoal.stages.overlapping import experts_for
from shoal.stages.personalise import Personalise
from shoal.types import HasOptions, option


@dataclass(frozen=True)
class PersonalModel(HasOptions):
    """Options for the training of a client's personal model."""

    group: ClassVar[str] = "personal"
    start: Literal["warm", "cold"] = option(
        "warm",
        "Train the personal model from the client's best expert whenever it is needed (warm), or from the first model "
        "in every round in which the client trains (cold).",
    )


@register("personalise", "gate")
class ExpertGate(Piece):
    """Lets a small network on every client weigh its experts and a personal model for each input."""

    source = "Li et al. 2026 (SCMoE-PFL), Alg. 2"
    requires = (EXPERTS,)
    requires_reason = "a gate weighs experts"
    uses = (EXPERTS_BESIDE_GLOBAL, CLASS_PRIOR)
    provides = (SERVED_MODEL_PREDICTIONS, PERSONAL_MODEL)
    client_keeps = "a gate over its models and, in methods without a global model, a personal model"

    def add_to(self, method: MethodBuilder) -> None:
        if method.provides(EXPERTS_BESIDE_GLOBAL):
            self._gate_over_global_and_experts(method)
        else:
            self._gate_over_personal_and_experts(method)

    def _gate_over_personal_and_experts(self, method: MethodBuilder) -> None:
        setting, overlapping = method.setting, method.provides(OVERLAPPING_CLUSTERS)
        start = setting.make("personal", PersonalModel).start
        if start == "cold" and not overlapping:
            method.refuse(self, "personal.start is 'cold', which needs overlapping clusters: it must be 'warm'")
        epochs = 5 if start == "warm" else setting.epochs
        personal_training = setting.make_training("personal", LocalTraining, epochs=epochs, start="own", name="private")
        if start == "cold":
            method.program = TrainSharedAndPersonal(
                method.ensure_set(method.program, "client program"), personal_training
            )
        gate = setting.make("gate", Gate, serves_without_gate=True)
        split = method.validation_split
        choice = (
            ChooseModel(setting.model, "hits", method.ensure_set(split, "validation split")) if overlapping else None
        )
        fit = setting.make("gate", FitGate, model=setting.model, gate=gate)
        program = TrainGate(fit, personal_training, choice, start)
        method.stages["personalise"].append(
            Personalise(program, experts_for, setting.rounds, setting.eval_every, cache_models=True)
        )
        method.models_to_serve, method.predict = experts_for, gated_predict(setting.model, gate)

    def _gate_over_global_and_experts(self, method: MethodBuilder) -> None:
        """Weighs the serving models. There is no personal model."""
        setting, uses_prior = method.setting, method.provides(CLASS_PRIOR)
        gate = setting.make("gate", Gate, top=0, shortlist=0, calibrate=False)
        fit = setting.make("gate", FitGate, model=setting.model, gate=gate)
        program = TrainExpertGate(fit, prior_pseudocount(method) if uses_prior else 1.0, uses_prior)
        method.personalisation.append(
            lambda served: (PersonaliseMembers(program, served, setting.rounds, setting.eval_every),)
        )
        method.gate = gate
        method.predict = corrected_predict(setting.model, gate, 1.0, uses_prior=False)
