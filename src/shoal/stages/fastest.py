"""Choice by how long clients take: the fastest of a group stand in for those with like data (HACCS)."""

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
    """Operations a second; NaN where a client's hardware is not known."""
    known = [state.devices.get(c) for c in clients]
    return np.array([d.flops_per_s if d else np.nan for d in known], dtype=np.float64)


def training_durations(sizes: Floats, speed: Floats) -> Floats:
    """How long clients take with their rows, up to a factor; of unknown hardware the median speed is expected."""
    usual = np.nanmedian(speed) if np.isfinite(speed).any() else 1.0
    return np.asarray(sizes / np.where(np.isfinite(speed), speed, usual))


@dataclass(frozen=True)
class SelectFastest(ServerOnly, HasOptions):
    """`size` clients from groups that are drawn by their loss and their speed, the fastest of each.

    A client's loss is the one of its last training: nobody is asked for it.
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
        grouped, reported = ClientTable.load(state, self.cluster_slot), ClientTable.load(state, self.size_slot)
        if not len(grouped):
            return state  # nobody has told anything yet
        seen = ClientTable.load(state, self.name).updated_with(ClientTable.load(state, self.train_slot))
        size, loss = reported.column("size", grouped.clients), seen.column("loss", grouped.clients)
        here = grouped.is_present(state.roster) & (size > 0)  # who has no rows would always be the fastest
        times = training_durations(size, speeds(state, grouped.clients))
        rows = fastest_of_clusters(grouped["group"].numpy(), times, loss, here, state.cohort_size, seed, self.rho)
        return replace(state, cohort=grouped.client_ids(rows), memory={**state.memory, self.name: seen.to_tree()})
