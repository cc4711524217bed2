"""DBSCAN on last layers, as in FedClusterEnsemble, or on any other vectors of clients."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLIENT_VECTORS,
    CLUSTER_MODELS,
    EXPERTS,
    FIRST_ROUND_MODELS,
    ONE_MODEL_PER_CLIENT,
)
from shoal.methods.composition.clusters import form_clusters
from shoal.methods.composition.piece import Piece, register
from shoal.stages.cluster import Clustering, Floats
from shoal.types import option


@register("cluster", "dbscan")
@dataclass(frozen=True)
class DensityClusters(Piece):
    """Clusters clients whose vectors are near each other (DBSCAN)."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 2, lines 9-15"
    requires = (CLIENT_VECTORS,)
    provides = (CLUSTER_MODELS, EXPERTS, ONE_MODEL_PER_CLIENT)
    uses = (FIRST_ROUND_MODELS,)
    server_learns = "which clients are similar"

    radius: float = option(
        0.5,
        "Treat two clients as neighbours if their distance is at most this multiple of the 90 % quantile of distances.",
        gt=0,
    )
    min_size: int = option(
        2, "Start a cluster from a client with at least this many neighbours, the client itself included.", ge=1
    )

    def add_to(self, method: MethodBuilder) -> None:
        form_clusters(method, self.cluster)

    def cluster(self, rows: Floats, seed: int) -> Clustering:
        """Returns the cluster of each row, which is the vector of a client."""
        from shoal.clusterers import NeighbourClusters

        estimator = NeighbourClusters(self.radius, min_samples=self.min_size).fit(rows)
        return Clustering(estimator.labels_, int(estimator.noise_.sum()))
