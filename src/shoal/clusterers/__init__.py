"""Groups of rows, whatever the rows are: estimators in the style of scikit-learn, without federated learning inside.

`__init__` stores, `fit(X)` checks and works, what was found ends in `_`. The partition does not depend on the order of
the rows (equal rows are interchangeable); `fit` numbers labels by first appearance. `OverlappingClusters` is no
partition: its clusters share rows, are in the order of their seeds, and depend on the order of the rows where these are
not separated.
"""

from shoal.clusterers.agglomerative import GreedyClusters
from shoal.clusterers.decomposed import DecomposedClusters
from shoal.clusterers.density import AdaptiveDensityClusters
from shoal.clusterers.fuzzy import FuzzyClusters
from shoal.clusterers.neighbours import NeighbourClusters
from shoal.clusterers.overlapping import OverlappingClusters
from shoal.clusterers.repulsive import RepulsiveClusters
from shoal.clusterers.similar import SimilarClusters

__all__ = [
    "AdaptiveDensityClusters",
    "DecomposedClusters",
    "FuzzyClusters",
    "GreedyClusters",
    "NeighbourClusters",
    "OverlappingClusters",
    "RepulsiveClusters",
    "SimilarClusters",
]
