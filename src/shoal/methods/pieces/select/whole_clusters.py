"""Selection of whole clusters, as in RepClust."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTERS_TO_SELECT_FROM
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.clusters import whole_clusters
from shoal.stages.select import SelectFromClusters


@register("select", "whole-clusters")
class WholeClusters(Piece):
    """Selects all clients of one cluster after another until the cohort is full."""

    source = "Pereira et al. (RepClust), Sec. III-B"
    requires = (CLUSTERS_TO_SELECT_FROM,)

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(SelectFromClusters(whole_clusters))
