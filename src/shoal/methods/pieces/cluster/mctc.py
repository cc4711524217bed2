"""Overlapping clusters, as in SCMoE-PFL."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import EXPERTS, OVERLAPPING_CLUSTERS, UPDATE_DIRECTIONS
from shoal.methods.composition.model_functions import mean_model_predict, one_expert_init
from shoal.methods.composition.piece import Piece, register
from shoal.stages.overlapping import FormOverlappingClusters, OverlapRule, experts_for


@register("cluster", "mctc")
class OverlappingClusters(Piece):
    """Forms overlapping clusters of clients whose updates point in similar directions (MCTC)."""

    source = "Li et al. 2026 (SCMoE-PFL), Alg. 1, Eq. 3-5"
    requires = (UPDATE_DIRECTIONS,)
    provides = (OVERLAPPING_CLUSTERS, EXPERTS)
    client_keeps = "the experts of all its clusters"
    server_learns = "which clients are similar"

    def add_to(self, method: MethodBuilder) -> None:
        model = method.setting.model
        method.init = one_expert_init(model)
        method.models_to_train = experts_for
        method.predict = mean_model_predict(model)
        clusters = FormOverlappingClusters(method.setting.make("cluster", OverlapRule))
        method.server_updates.append(clusters)
        method.cluster_assigner = clusters
