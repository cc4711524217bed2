"""Selection of clients of every cluster, as in SimClust."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTERS_TO_SELECT_FROM
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.clusters import one_of_each
from shoal.stages.select import SelectFromClusters


@register("select", "one-of-each")
class OneOfEach(Piece):
    """Selects clients from as many clusters as possible."""

    source = "Pereira et al. (SimClust), Sec. III-A"
    requires = (CLUSTERS_TO_SELECT_FROM,)

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(SelectFromClusters(one_of_each))
