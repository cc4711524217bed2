"""Clusters of clients with similar labels, for selection only, as in SimClust."""

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
from shoal.stages.cluster import SimilarLabels


@register("cluster", "similar")
class SimilarLabelClusters(Piece):
    """Clusters clients with similar label distributions. All clients share one model."""

    source = "Pereira et al. (SimClust), Sec. III-A"
    provides = (CLUSTERS_TO_SELECT_FROM, ONE_MODEL, GLOBAL_MODEL, PERSISTENT_MODELS, ONE_MODEL_PER_CLIENT)
    must_be_used = (CLUSTERS_TO_SELECT_FROM,)
    uses = (LABEL_DISTRIBUTIONS,)
    server_learns = "which clients have similar labels"

    def add_to(self, method: MethodBuilder) -> None:
        form_selection_clusters(method, method.setting.make("cluster", SimilarLabels))
