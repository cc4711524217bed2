"""Selection by training time: the fastest clients of a cluster represent clients with similar data (HACCS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.client_table import ClientTable
from shoal.selectors.fastest import fastest_of_clusters
from shoal.stages.base import ServerOnly
from shoal.types import ClientId, HasOptions, Report, ServerState, option

Floats = NDArray[np.float64]


def speeds(state: ServerState, clients: Sequence[ClientId]) -> Floats:
    """Returns the operations per second of each client, and NaN where its hardware is not known."""
    devices = [state.devices.get(c) for c in clients]
    return np.array([d.flops_per_s if d else np.nan for d in devices], dtype=np.float64)


def training_durations(sizes: Floats, speed: Floats) -> Floats:
    """Returns training times that are correct up to a common factor. Unknown hardware gets the median speed."""
    median_speed = np.nanmedian(speed) if np.isfinite(speed).any() else 1.0
    return np.asarray(sizes / np.where(np.isfinite(speed), speed, median_speed))


@dataclass(frozen=True)
class SelectFastest(ServerOnly, HasOptions):
    """Draws clusters by their loss and speed and selects the fastest clients of each.

    The loss of a client is the one that it reported with its last training, so no extra report is needed.
    """

    rho: float = option(
        0.5,
        "A cluster's speed has this weight when clusters are drawn, and its loss has the remaining weight.",
        ge=0,
        le=1,
    )
    cluster_slot: str = "cluster"
    size_slot: str = "represent"
    train_slot: str = "train"
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clusters, sizes = ClientTable.load(state, self.cluster_slot), ClientTable.load(state, self.size_slot)
        if not len(clusters):
            return state  # no clusters have been formed yet
        losses = ClientTable.load(state, self.name).updated_with(ClientTable.load(state, self.train_slot))
        size, loss = sizes.column("size", clusters.clients), losses.column("loss", clusters.clients)
        is_available = clusters.is_present(state.roster) & (
            size > 0
        )  # a client without samples would always be the fastest
        times = training_durations(size, speeds(state, clusters.clients))
        selected = fastest_of_clusters(
            clusters["group"].numpy(), times, loss, is_available, state.cohort_size, seed, self.rho
        )
        return replace(
            state, cohort=clusters.client_ids(selected), memory={**state.memory, self.name: losses.to_tree()}
        )
