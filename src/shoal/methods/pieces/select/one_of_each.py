"""Clients of every group, as SimClust selects them."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTERS_TO_SELECT_FROM
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.groups import one_of_each
from shoal.stages.select import SelectFromClusters


@register("select", "one-of-each")
class OneOfEach(Piece):
    """Clients from as many groups as possible."""

    source = "Pereira et al. (SimClust), Sec. III-A"
    requires = (CLUSTERS_TO_SELECT_FROM,)

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(SelectFromClusters(one_of_each))
