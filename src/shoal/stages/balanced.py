"""Clients chosen so that a round's rows hold all classes alike."""

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


def label_counts(known: ClientTable) -> NDArray[np.float64]:
    """Of each client, as far as it told: its label distribution times its rows."""
    counts: NDArray[np.float64] = (known["labels"].double() * known["size"].double()[:, None]).numpy()
    return counts


@dataclass(frozen=True)
class SelectBalanced(ServerOnly, HasOptions):
    """The cohort with the flattest label counts of all. `waiting` is the share of it that has waited longest, in
    whatever group, and is taken whatever it holds. Where there are groups, the others are taken so that each has its
    share of the cohort as nearly as can be, and is balanced by itself. Of every round it tells how flat the cohort is:
    1/classes where all classes are alike."""

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
        known = ClientTable.load(state, self.source)
        if not len(known):
            return state  # nobody has told anything yet
        counts, is_present = label_counts(known), known.is_present(state.roster)
        last = ClientTable.load(state, self.name).column("last", known.clients)
        last = np.where(np.isnan(last), -1, last)
        groups, chance = _clusters(state, known), derive_seed(seed, NO_CLUSTER)
        first = longest_waiting_clients(counts, last, is_present, state.cohort_size, self.waiting_fraction, chance)
        shares = _cohort_size_by_cluster(groups[is_present], groups[first], state.cohort_size)
        parts = [
            fill_cohort(counts, first[groups[first] == g], (groups == g) & is_present, k, chance)
            for g, k in shares.items()
        ]
        rows = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
        last[rows] = state.round
        kept = ClientTable(known.clients, {"last": torch.from_numpy(last).long()})
        return replace(
            state,
            cohort=known.client_ids(rows),
            memory={**state.memory, self.name: kept.to_tree()},
            round_metrics={
                **state.round_metrics,
                f"{self.name}.concentration": float(concentration(counts[rows].sum(0))),
            },
        )


def _clusters(state: ServerState, known: ClientTable) -> NDArray[np.int64]:
    """The group of each client, those who are in none together."""
    return np.array([int(state.membership[c].argmax()) if c in state.membership else NO_CLUSTER for c in known.clients])


def _cohort_size_by_cluster(
    available: NDArray[np.int64], selected: NDArray[np.int64], cohort_size: int
) -> dict[int, int]:
    """How many of each group take part, by the groups of all who are there and of those who are taken already: one by
    one to the group that is furthest below its part, the lower one first."""
    members = dict(zip(*(x.tolist() for x in np.unique(available, return_counts=True)), strict=True))
    cohort_size = min(cohort_size, len(available))
    shares = {g: int((selected == g).sum()) for g in members}
    for _ in range(cohort_size - len(selected)):
        open_ = [g for g in members if shares[g] < members[g]]
        shares[max(open_, key=lambda g: (cohort_size * members[g] / len(available) - shares[g], -g))] += 1
    return shares
