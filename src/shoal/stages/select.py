"""Selection of a round's cohort at random, by size, by loss or in turn.

Other rules are in modules of their own, such as `balanced`, `bandit` and `loss_correlation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.rng import derive_seed, generator
from shoal.selectors.round_robin import num_selected_of, select_in_turn
from shoal.selectors.sampling import sample_by_size, select_largest
from shoal.stages.base import OneProgram, ServerOnly
from shoal.stages.experts import WITHOUT_SAMPLES_SLOT, unassigned_clients
from shoal.types import (
    CENTRALISED_CLIENT,
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    Plan,
    Report,
    Schedule,
    ServerState,
    Task,
    option,
)

ClientIndices = NDArray[np.int64]
SIZE_STAGE = "sizes"  # the stage in which clients report their number of samples


@dataclass(frozen=True)
class SelectRandom(ServerOnly):
    """Selects random clients, or all present clients if there are fewer than the cohort size.

    The probabilities can depend on the numbers of samples that clients reported.
    """

    probability: Literal["uniform", "size"] = option(
        "uniform",
        "Select random clients with equal probability (uniform) or in proportion to their number of samples (size).",
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if self.probability == "size":
            reported = ClientTable.load(state, SIZE_STAGE)
            return replace(
                state,
                cohort=reported.client_ids(_sample_known_by_size(reported, state.roster, state.cohort_size, seed)),
            )
        order = torch.randperm(len(state.roster), generator=generator(seed))[: state.cohort_size]
        return replace(state, cohort=tuple(state.roster[i] for i in sorted(order.tolist())))


@dataclass(frozen=True)
class SelectByFunction(ServerOnly):
    """Selects the clients that a function returns.

    The cohort is in the order of the roster, because a set of names has a different order in every process.
    """

    choose: Callable[[ServerState, int], Iterable[ClientId]]  # (the state, seed)
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        selected = set(self.choose(state, seed))
        if absent := selected - set(state.roster):
            raise UserError(
                f"Stage {self.name!r} selected client {min(absent, key=str)!r}, which is not among the "
                f"{len(state.roster)} clients of the round. It must select from state.roster."
            )
        return replace(state, cohort=tuple(c for c in state.roster if c in selected))


@dataclass(frozen=True)
class SelectCentralised(ServerOnly):
    """Selects the single client that holds the data of all clients, which is centralised training."""

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, cohort=(CENTRALISED_CLIENT,))


def _sample_known_by_size(reported: ClientTable, roster: Sequence[ClientId], count: int, seed: int) -> ClientIndices:
    if not len(reported):
        return np.empty(0, dtype=np.int64)  # no client has reported its number of samples yet
    return sample_by_size(reported["size"].double().numpy(), reported.is_present(roster), count, seed)


@dataclass(frozen=True)
class SelectFromClusters(ServerOnly):
    """Selects clients by their clusters."""

    # (cluster of each client, whether each client is present, cohort size, seed) -> indices of the cohort
    rule: Callable[[ClientIndices, NDArray[np.bool_], int, int], ClientIndices]
    cluster_slot: str = "cluster"
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clusters = ClientTable.load(state, self.cluster_slot)
        if not len(clusters):
            return state  # no clusters have been formed yet
        selected = self.rule(clusters["group"].numpy(), clusters.is_present(state.roster), state.cohort_size, seed)
        return replace(state, cohort=clusters.client_ids(selected))


@dataclass(frozen=True)
class SelectLargestLoss(OneProgram, HasOptions):
    """Selects the candidates with the largest losses (power of choice).

    Candidates are drawn with probabilities proportional to their numbers of samples and report their loss.
    """

    program: ClientProgram
    models_for: ModelsFor
    candidates: int = option(
        0,
        "Draw this many candidates, which report their loss before the cohort is selected. 0 draws twice the cohort, "
        "and fewer than the cohort are refused.",
        ge=0,
    )
    name: str = "select"
    schedule: ClassVar[Schedule] = Schedule("candidates")

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported = ClientTable.load(state, SIZE_STAGE)
        drawn = reported.client_ids(
            _sample_known_by_size(reported, state.roster, self.candidates or 2 * state.cohort_size, seed)
        )
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in drawn})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clients = tuple(sorted(reports))
        losses = np.array(
            [
                total / num_samples if num_samples else np.nan
                for total, num_samples in (reports[c].metrics["loss"] for c in clients)
            ]
        )
        selected = select_largest(losses, np.ones(len(clients), dtype=bool), state.cohort_size)
        return replace(state, cohort=tuple(clients[i] for i in selected.tolist()))


@dataclass(frozen=True)
class SelectRoundRobin(ServerOnly, HasOptions):
    """Selects a fraction of each cluster in turn, or one client of each where there are several clusters.

    It also selects all clients without a cluster, which in the first round are all clients. Clients that reported that
    they have no samples are never selected.
    """

    per_cluster: Literal["fraction", "one"] = option(
        "fraction",
        "Select a fraction of each cluster (fraction) or, where there are several clusters, one client of each (one).",
    )
    cluster_fraction: float = option(
        0.7,
        "Select this fraction of the clients of each cluster in turn. With select.per_cluster=one it applies where "
        "there is only one cluster.",
        gt=0,
        le=1,
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        members = tuple(sorted(state.membership))
        turns, is_present = self._turns(state, members), np.isin(members, state.roster)
        clusters = np.array([state.cluster_of(c) for c in members], dtype=np.int64)
        selected: list[ClientId] = unassigned_clients(state, WITHOUT_SAMPLES_SLOT)
        for k in range(len(state.models) if members else 0):
            in_cluster = np.flatnonzero(clusters == k)
            taken, turns[in_cluster] = select_in_turn(
                turns[in_cluster], is_present[in_cluster], self._num_selected(len(in_cluster), len(state.models))
            )
            selected += [members[i] for i in in_cluster[taken].tolist()]
        memory = {**state.memory, self.name: ClientTable(members, {"turn": torch.from_numpy(turns)}).to_tree()}
        return replace(state, cohort=tuple(sorted(selected)), memory=memory if members else state.memory)

    def _num_selected(self, members: int, clusters: int) -> int:
        return 1 if self.per_cluster == "one" and clusters > 1 else num_selected_of(members, self.cluster_fraction)

    def _turns(self, state: ServerState, members: tuple[ClientId, ...]) -> np.ndarray:
        """Returns the turn of each member. New members come last, in the order of their names."""
        remembered = ClientTable.load(state, self.name)
        turns = remembered.column("turn", members) if len(remembered) else np.full(len(members), np.nan)
        new = np.isnan(turns)
        turns[new] = np.nanmax(turns, initial=-1) + 1 + np.arange(new.sum())
        return turns.astype(np.int64)
