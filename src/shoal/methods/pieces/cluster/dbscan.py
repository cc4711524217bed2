"""DBSCAN, of last layers as FedClusterEnsemble uses it, or of any other vectors of clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLIENT_VECTORS,
    CLUSTER_MODELS,
    EXPERTS,
    FIRST_ROUND_MODELS,
    ONE_MODEL_PER_CLIENT,
)
from shoal.methods.composition.piece import Piece, register
from shoal.rng import derive_seed
from shoal.stages.cluster import Floats, Labels
from shoal.stages.experts import Experts, expert_for, numbered
from shoal.stages.first_round_clusters import FIRST, FormFirstRoundClusters, Neighbours, trained_by
from shoal.types import ServerState


@dataclass(frozen=True)
class VectorDbscan(Neighbours):
    """DBSCAN of the vectors that clients reported; of a vector in several parts only the first part is compared."""

    parts: int = 1

    def __call__(self, rows: Floats, seed: int = 0) -> Labels:  # type: ignore[override]
        return super().__call__(self._row(rows)).labels_

    def join(self, rows: Floats, labels: Labels, newcomers: Floats) -> Labels:
        from shoal.clusterers.neighbours import nearest

        return nearest(self._row(rows), labels, self._row(newcomers))

    def again(self, rows: Floats, labels: Labels, now: Floats, seed: int) -> tuple[Floats, Labels]:
        return now, self(now, seed)

    def _row(self, rows: Floats) -> Floats:
        return np.asarray(rows[:, : rows.shape[1] // self.parts])


@register("cluster", "dbscan")
class DensityClusters(Piece):
    """Clusters of clients whose vectors are near each other (DBSCAN)."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 2, lines 9-15"
    needs = (CLIENT_VECTORS,)
    provides = (CLUSTER_MODELS, EXPERTS, ONE_MODEL_PER_CLIENT)
    uses = (FIRST_ROUND_MODELS,)
    server_learns = "which clients are similar"

    def add_to(self, method: MethodBuilder) -> None:
        method.give_clusters_models()
        if method.provides(FIRST_ROUND_MODELS):
            self._cluster_first_models(method)
        else:
            representation = method.required(method.representation, "representation")
            rule = method.setting.make("cluster", VectorDbscan, parts=representation.parts)
            experts = Experts(rule, representation.column, representation_bounds=representation.bounds)
            method.stages["cluster"].append(experts)
            method.clusters = experts

    def _cluster_first_models(self, method: MethodBuilder) -> None:
        model, rule = method.setting.model, method.setting.make("cluster", Neighbours)

        def init(seed: int) -> ServerState:
            first = derive_seed(seed, "init")
            return ServerState(0, numbered([model.init(first)]), memory={FIRST: {"seed": torch.tensor(first)}})

        method.init, method.models_to_train, method.models_to_serve = init, trained_by(model), expert_for
        method.updates.append(FormFirstRoundClusters(rule, model))
