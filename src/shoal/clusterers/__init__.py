"""Clusterers as scikit-learn estimators, without federated learning inside.

All estimators follow the conventions of scikit-learn: `__init__` stores the parameters, `fit(X)` validates and
computes, and names of results end in `_`. The partition does not depend on the order of the rows (equal rows are
interchangeable), and `fit` numbers clusters by first appearance. Two estimators are exceptions:

- `OverlappingClusters` numbers clusters in the order of their seeds. Its clusters share rows, and they depend on the
  order of the rows where they are not separated.
- `FuzzyClusters` numbers clusters in the order in which k-means finds their centres.

A class is loaded when it is first used, because scikit-learn takes long to import. The checks of input and the
numbering of labels are in `validation`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "AdaptiveDensityClusters": "density",
    "DecomposedClusters": "decomposed",
    "FuzzyClusters": "fuzzy",
    "GreedyClusters": "agglomerative",
    "NeighbourClusters": "neighbours",
    "OverlappingClusters": "overlapping",
    "RepulsiveClusters": "repulsive",
    "SimilarClusters": "similar",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.clusterers' has no attribute {name!r}")
    return getattr(import_module(f"shoal.clusterers.{_MODULES[name]}"), name)
