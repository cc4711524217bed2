"""Clusters of clients with complementary labels, for selection only, as in RepClust."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLUSTERS_TO_SELECT_FROM,
    GLOBAL_MODEL,
    LABEL_DISTRIBUTIONS,
    ONE_MODEL,
    ONE_MODEL_PER_CLIENT,
    PERSISTENT_MODELS,
)
from shoal.methods.composition.clusters import form_selection_clusters
from shoal.methods.composition.piece import Piece, register
from shoal.stages.cluster import DiverseLabels


@register("cluster", "repulsive")
class DiverseLabelClusters(Piece):
    """Clusters clients so that the labels of each cluster are as mixed as possible. All clients share one model."""

    source = "Pereira et al. (RepClust), Eq. 3, Alg. 1"
    provides = (CLUSTERS_TO_SELECT_FROM, ONE_MODEL, GLOBAL_MODEL, PERSISTENT_MODELS, ONE_MODEL_PER_CLIENT)
    must_be_used = (CLUSTERS_TO_SELECT_FROM,)
    uses = (LABEL_DISTRIBUTIONS,)
    server_learns = "which clients complement each other's labels"

    def add_to(self, method: MethodBuilder) -> None:
        form_selection_clusters(method, method.setting.make("cluster", DiverseLabels))
