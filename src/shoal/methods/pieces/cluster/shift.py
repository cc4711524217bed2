"""Experts beside a global model, for clients with a conditional shift."""

from __future__ import annotations

from shoal.client.shift_probe import SumClassFeatures
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import EXPERTS, EXPERTS_BESIDE_GLOBAL, GLOBAL_MODEL, PERSISTENT_MODELS
from shoal.methods.composition.piece import Piece, register
from shoal.stages.global_and_experts import global_and_all_experts, global_and_own_expert
from shoal.stages.shift_probe import ShiftProbe


@register("cluster", "shift")
class ShiftClusters(Piece):
    """Clusters clients only when a probe detects a conditional shift between them."""

    source = "shoal"
    provides = (EXPERTS_BESIDE_GLOBAL, EXPERTS, GLOBAL_MODEL, PERSISTENT_MODELS)
    must_be_used = (EXPERTS_BESIDE_GLOBAL,)
    client_sends = "sums of the global model's features for each class"
    client_keeps = "the experts beside the global model, once there are clusters"
    server_learns = "these sums, the label counts and, once there are clusters, the cluster of each client"

    def add_to(self, method: MethodBuilder) -> None:
        program = method.setting.make("probe", SumClassFeatures, model=method.setting.model)
        method.stages["cluster"].append(method.setting.make("probe", ShiftProbe, program=program))
        method.models_to_train, method.models_to_serve = global_and_own_expert, global_and_all_experts
