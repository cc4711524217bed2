"""The selection of RepClust beside any clusters: it forms clusters by labels that serve for selection only."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import LABEL_DISTRIBUTIONS
from shoal.methods.composition.clusters import form_selection_clusters
from shoal.methods.composition.piece import Piece, register
from shoal.selectors.clusters import whole_clusters
from shoal.stages.cluster import DiverseLabels
from shoal.stages.select import SelectFromClusters

CLUSTERS_STAGE = "groups"  # the stage that forms clusters for selection, while the cluster step may form others


@register("select", "repclust")
class RepClustSelection(Piece):
    """Selects clients from clusters with mixed labels, which are formed for selection only."""

    source = "Pereira et al. (RepClust), Sec. III-B, Alg. 1"
    uses = (LABEL_DISTRIBUTIONS,)
    client_sends = "its label distribution"
    server_learns = "the label distribution of every client"

    def add_to(self, method: MethodBuilder) -> None:
        form_selection_clusters(
            method, method.setting.make("select", DiverseLabels), step="select", stage_name=CLUSTERS_STAGE
        )
        method.stages["select"].append(SelectFromClusters(whole_clusters, cluster_slot=CLUSTERS_STAGE))
