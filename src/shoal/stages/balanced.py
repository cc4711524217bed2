"""Selection of a cohort whose samples together have a flat label distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.selectors.balanced import concentration, fill_cohort, longest_waiting_clients
from shoal.stages.base import ServerOnly
from shoal.types import ClientId, HasOptions, Report, ServerState, option

REPRESENT_STAGE = "represent"
NO_CLUSTER = -1


def label_counts(reported: ClientTable) -> NDArray[np.float64]:
    """Returns the label counts of each client: its reported label distribution times its number of samples."""
    counts: NDArray[np.float64] = (reported["labels"].double() * reported["size"].double()[:, None]).numpy()
    return counts


@dataclass(frozen=True)
class SelectBalanced(ServerOnly, HasOptions):
    """Selects the cohort whose summed label counts are flattest.

    The fraction `waiting_fraction` of the cohort goes to the clients that have waited longest, whatever their clusters
    and labels. If there are clusters, the rest of the cohort is divided among them in proportion to their sizes and is
    balanced within each. The metric `concentration` of a round is 1 / num_classes if all classes are equally frequent.
    """

    waiting_fraction: float = option(
        0.5,
        "Give this fraction of the cohort to the clients that have waited longest. The other clients are selected so "
        "that the label distribution of the cohort becomes flat.",
        ge=0,
        le=1,
    )
    source: str = REPRESENT_STAGE
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reported = ClientTable.load(state, self.source)
        if not len(reported):
            return state  # no client has reported its labels yet
        counts, is_present = label_counts(reported), reported.is_present(state.roster)
        last_rounds = ClientTable.load(state, self.name).column("last", reported.clients)
        last_rounds = np.where(np.isnan(last_rounds), -1, last_rounds)
        clusters, tie_seed = _clusters(state, reported), derive_seed(seed, NO_CLUSTER)
        longest_waiting = longest_waiting_clients(
            counts, last_rounds, is_present, state.cohort_size, self.waiting_fraction, tie_seed
        )
        size_by_cluster = _cohort_size_by_cluster(clusters[is_present], clusters[longest_waiting], state.cohort_size)
        selected_parts = [
            fill_cohort(
                counts, longest_waiting[clusters[longest_waiting] == g], (clusters == g) & is_present, k, tie_seed
            )
            for g, k in size_by_cluster.items()
        ]
        selected = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *selected_parts]))
        last_rounds[selected] = state.round
        remembered = ClientTable(reported.clients, {"last": torch.from_numpy(last_rounds).long()})
        return replace(
            state,
            cohort=reported.client_ids(selected),
            memory={**state.memory, self.name: remembered.to_tree()},
            round_metrics={
                **state.round_metrics,
                f"{self.name}.concentration": float(concentration(counts[selected].sum(0))),
            },
        )


def _clusters(state: ServerState, reported: ClientTable) -> NDArray[np.int64]:
    """Returns the cluster of each client, and `NO_CLUSTER` for all clients without one."""
    return np.array(
        [int(state.membership[c].argmax()) if c in state.membership else NO_CLUSTER for c in reported.clients]
    )


def _cohort_size_by_cluster(
    available: NDArray[np.int64], selected: NDArray[np.int64], cohort_size: int
) -> dict[int, int]:
    """Returns how many clients of each cluster are selected.

    `available` and `selected` are the clusters of all present clients and of the clients that are selected already.
    The remaining places go one by one to the cluster that is furthest below its share. The lower number wins a tie.
    """
    members = dict(zip(*(x.tolist() for x in np.unique(available, return_counts=True)), strict=True))
    cohort_size = min(cohort_size, len(available))
    sizes = {g: int((selected == g).sum()) for g in members}
    for _ in range(cohort_size - len(selected)):
        not_full = [g for g in members if sizes[g] < members[g]]
        sizes[max(not_full, key=lambda g: (cohort_size * members[g] / len(available) - sizes[g], -g))] += 1
    return sizes
