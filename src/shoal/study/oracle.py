"""The method shoal with known planted groups: the best that its shift probe and gate could reach. It is for studies.

From the first round of the probe on, each planted group has an expert. A client predicts with the expert of its group,
with prior correction and without a gate. A study names the method `shoal.study.oracle:oracle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shoal import tree
from shoal.client.prior import PRIOR
from shoal.methods.composition.setting import Setting
from shoal.methods.shoal import shoal
from shoal.stages.base import ServerOnly
from shoal.stages.experts import assign_clients, named_experts
from shoal.stages.global_and_experts import GLOBAL, PersonaliseMembers
from shoal.stages.momentum import ema_models
from shoal.stages.shift_probe import ShiftProbe
from shoal.stages.training_prior import training_priors
from shoal.types import ClientId, Method, Params, Report, Rounds, Schedule, ServerState


@dataclass(frozen=True)
class PlantedExperts(ServerOnly):
    """Assigns every client to its planted group once. The expert of each group starts as the global model."""

    planted_groups: Mapping[ClientId, int]
    first_round: int
    name: str = "probe"

    @property
    def schedule(self) -> Schedule:
        return Schedule("none", (Rounds(self.first_round, 0),) if self.planted_groups else ())

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clients = [c for c in state.roster if c in self.planted_groups]
        global_model, num_experts = state.models[GLOBAL], len(set(self.planted_groups.values()))
        state = replace(
            state, models=named_experts([global_model] * num_experts) | {GLOBAL: global_model}, membership={}
        )
        return assign_clients(state, clients, np.array([self.planted_groups[c] for c in clients]))


def oracle(setting: Setting) -> Method:
    """Builds the method."""
    method = shoal(setting)
    probe = next(stage for stage in method.stages if isinstance(stage, ShiftProbe))
    stages_without_gate = [stage for stage in method.stages if not isinstance(stage, PersonaliseMembers)]
    planted = PlantedExperts(setting.planted_groups or {}, probe.first_round)
    stages = tuple(planted if stage is probe else stage for stage in stages_without_gate)

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        models, name = ema_models(state), GLOBAL
        if client is not None and client in state.membership:
            name = sorted(state.models)[int(state.membership[client].argmax())]
        priors = training_priors(state)
        serving_model = {GLOBAL: models[name]} | ({PRIOR: {GLOBAL: priors[name]}} if priors else {})
        return tree.to_device(serving_model, setting.model.device)

    return replace(method, name="oracle", stages=stages, models_for=models_for)
