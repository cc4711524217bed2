"""The selection of SimClust beside any clusters: it forms clusters by labels that serve for selection only."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import LABEL_DISTRIBUTIONS
from shoal.methods.composition.clusters import form_selection_clusters
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.clusters import one_of_each
from shoal.stages.cluster import SimilarLabels
from shoal.stages.select import SelectFromClusters

CLUSTERS_STAGE = "groups"  # the stage that forms clusters for selection, while the cluster step may form others


@register("select", "simclust")
class SimClustSelection(Piece):
    """Selects clients from clusters with similar labels, which are formed for selection only."""

    source = "Pereira et al. (SimClust), Sec. III-A"
    uses = (LABEL_DISTRIBUTIONS,)
    client_sends = "its label distribution"
    server_learns = "the label distribution of every client"

    def add_to(self, method: MethodBuilder) -> None:
        form_selection_clusters(
            method, method.setting.make("select", SimilarLabels), step="select", stage_name=CLUSTERS_STAGE
        )
        method.stages["select"].append(SelectFromClusters(one_of_each, cluster_slot=CLUSTERS_STAGE))
