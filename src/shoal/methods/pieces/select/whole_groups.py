"""Whole groups of clients, as RepClust selects them."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTERS_TO_SELECT_FROM
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.groups import whole_clusters
from shoal.stages.select import SelectFromClusters


@register("select", "whole-groups")
class WholeClusters(Piece):
    """All clients of one group after another, until the cohort is full."""

    source = "Pereira et al. (RepClust), Sec. III-B"
    requires = (CLUSTERS_TO_SELECT_FROM,)

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(SelectFromClusters(whole_clusters))
