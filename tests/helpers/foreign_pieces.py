"""A clusterer, a selector and an aggregator as another package would define them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal import tree
from shoal.methods.composition import UPDATE_NORMS, MethodBuilder, Piece, average_models, form_clusters, option
from shoal.methods.composition import select_clients as select
from shoal.methods.composition.capability import (
    CLIENT_VECTORS,
    CLUSTER_MODELS,
    EXPERTS,
    INDIVIDUAL_UPDATES,
    ONE_MODEL_PER_CLIENT,
    UPDATE_SUMMARIES,
)


@dataclass(frozen=True)
class Halves(Piece):
    """Forms two clusters: clients with a large first entry, and the others."""

    step = "cluster"
    requires = (CLIENT_VECTORS,)
    provides = (CLUSTER_MODELS, EXPERTS, ONE_MODEL_PER_CLIENT)

    quantile: float = option(0.5, "Put this fraction of the clients into the first cluster. Default: 0.5.", gt=0, lt=1)

    def add_to(self, method: MethodBuilder) -> None:
        form_clusters(method, lambda vectors, seed: vectors[:, 0] > np.quantile(vectors[:, 0], self.quantile))


@dataclass(frozen=True)
class LargestUpdates(Piece):
    """Selects clients that have not trained yet, then the clients with the largest last updates."""

    step = "select"
    requires = (UPDATE_SUMMARIES,)

    def add_to(self, method: MethodBuilder) -> None:
        select(method, lambda state, seed: self.choose(UPDATE_NORMS(state), state.roster, state.cohort_size))

    def choose(self, norms, roster, count):
        return sorted(roster, key=lambda c: -float(norms.get(c, np.inf)))[:count]


@dataclass(frozen=True)
class Median(Piece):
    """Takes the median of every parameter."""

    step = "aggregate"
    provides = (INDIVIDUAL_UPDATES,)

    def add_to(self, method: MethodBuilder) -> None:
        average_models(
            method, lambda models, weights: tree.map_leaves(lambda *xs: torch.stack(xs).median(0).values, *models)
        )
