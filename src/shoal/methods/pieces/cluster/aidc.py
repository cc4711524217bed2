"""Adaptive density-based clusters, as in FedEPC."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.client.sparsity import MeasureSparsity
from shoal.client_table import ClientTable
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTER_MODELS, EXPERTS, ONE_MODEL_PER_CLIENT, SPARSITY_VECTORS
from shoal.methods.composition.piece import Piece, register
from shoal.stages.cluster import SparsityClusters
from shoal.stages.experts import ClusterModels, expert_for
from shoal.stages.extract import extractor_for
from shoal.types import ModelsForInputs, Params, ServerState


@register("cluster", "aidc")
class AdaptiveClusters(Piece):
    """Clusters clients with similar activation sparsity and finds the number of clusters itself (AIDC)."""

    source = "Tang et al. 2025 (FedEPC), Eq. 3-8, Alg. 2"
    requires = (SPARSITY_VECTORS,)
    requires_reason = "the two halves separate a difference between clients from a random one"
    provides = (CLUSTER_MODELS, EXPERTS, ONE_MODEL_PER_CLIENT)
    server_learns = "which clients are similar"

    def add_to(self, method: MethodBuilder) -> None:
        rule = method.setting.make("cluster", SparsityClusters)
        vectors = method.vectors
        if not vectors.follows_data:
            unless = "represent.every_rounds is above 0 and represent.noise_std is 0"
            method.setting.mark_without_effect("cluster", "drift_ratio", unless=unless)
        experts = ClusterModels(rule, vectors.column, representation_bounds=vectors.bounds)
        method.use_cluster_models()
        method.stages["cluster"].append(experts)
        method.cluster_assigner = experts
        method.models_for_inputs = _assign_by_received_model(
            rule, experts, method.ensure_set(method.sparsity, "sparsity")
        )


def _assign_by_received_model(
    rule: SparsityClusters, experts: ClusterModels, sparsity: MeasureSparsity
) -> ModelsForInputs:
    """Returns a function that gives an unseen client the model of the cluster with the most similar sparsity.

    An unseen client has no labels with which to adapt a model, so the sparsity of the received model is compared. The
    client computes it, and nothing leaves the client.
    """

    def assign(state: ServerState, x: Tensor) -> Mapping[str, Params]:
        clustered = ClientTable.load(state, experts.name)
        if not len(clustered):
            return expert_for(state, None)
        with torch.no_grad():
            vector = sparsity.sparsity_vector(extractor_for(state, None)["extractor"], x).cpu().double().numpy()
        cluster = rule.nearest_cluster(clustered["rows"].double().numpy(), clustered["expert"].numpy(), vector)
        return {"expert": state.models[sorted(state.models)[cluster]]}

    return assign
