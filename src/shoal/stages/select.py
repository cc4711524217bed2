"""Who takes part in a round."""

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
SIZE_STAGE = "sizes"  # the stage in which clients tell how many rows they hold


@dataclass(frozen=True)
class SelectRandom(ServerOnly):
    """Distinct clients by chance; a smaller roster takes part whole. Sizes are those that clients have told."""

    probability: Literal["uniform", "size"] = option(
        "uniform",
        "Select random clients with equal probability (uniform) or in proportion to their number of samples (size).",
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if self.probability == "size":
            known = ClientTable.load(state, SIZE_STAGE)
            return replace(
                state, cohort=known.client_ids(_sample_known_by_size(known, state.roster, state.cohort_size, seed))
            )
        order = torch.randperm(len(state.roster), generator=generator(seed))[: state.cohort_size]
        return replace(state, cohort=tuple(state.roster[i] for i in sorted(order.tolist())))


@dataclass(frozen=True)
class SelectByFunction(ServerOnly):
    """The clients that a function names. They are in the order of the roster, whatever order the function gives: a set
    of names has another order in every process."""

    choose: Callable[[ServerState, int], Iterable[ClientId]]  # (the state, seed)
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        chosen = set(self.choose(state, seed))
        if absent := chosen - set(state.roster):
            raise UserError(
                f"stage {self.name!r} selected {min(absent, key=str)!r}, which is not among the {len(state.roster)} "
                "clients of the round; it must select from state.roster"
            )
        return replace(state, cohort=tuple(c for c in state.roster if c in chosen))


@dataclass(frozen=True)
class SelectCentralised(ServerOnly):
    """The one who holds everybody's data: what federation gives up."""

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, cohort=(CENTRALISED_CLIENT,))


def _sample_known_by_size(known: ClientTable, roster: Sequence[ClientId], count: int, seed: int) -> ClientIndices:
    if not len(known):
        return np.empty(0, dtype=np.int64)  # nobody has told anything yet
    return sample_by_size(known["size"].double().numpy(), known.is_present(roster), count, seed)


@dataclass(frozen=True)
class SelectFromClusters(ServerOnly):
    """Clients chosen by the groups they are in."""

    rule: Callable[
        [ClientIndices, NDArray[np.bool_], int, int], ClientIndices
    ]  # (group of each, who is there, how many, seed)
    cluster_slot: str = "cluster"
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        grouped = ClientTable.load(state, self.cluster_slot)
        if not len(grouped):
            return state  # nobody has told anything yet
        chosen = self.rule(grouped["group"].numpy(), grouped.is_present(state.roster), state.cohort_size, seed)
        return replace(state, cohort=grouped.client_ids(chosen))


@dataclass(frozen=True)
class SelectLargestLoss(OneProgram, HasOptions):
    """Power of choice: candidates, likelier the more rows they have, tell their loss; the largest take part."""

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
        known = ClientTable.load(state, SIZE_STAGE)
        asked = known.client_ids(
            _sample_known_by_size(known, state.roster, self.candidates or 2 * state.cohort_size, seed)
        )
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in asked})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clients = tuple(sorted(reports))
        losses = np.array(
            [total / rows if rows else np.nan for total, rows in (reports[c].metrics["loss"] for c in clients)]
        )
        chosen = select_largest(losses, np.ones(len(clients), dtype=bool), state.cohort_size)
        return replace(state, cohort=tuple(clients[i] for i in chosen.tolist()))


@dataclass(frozen=True)
class SelectRoundRobin(ServerOnly, HasOptions):
    """In every cluster a share of its members in turn, or one (where there are several clusters); and whoever is in
    none, which in the first round is everybody. Only who is known to have no rows is never asked."""

    per_cluster: Literal["share", "one"] = option(
        "share",
        "Select a fraction of each cluster (share) or, where there are several clusters, one client of each (one).",
    )
    cluster_fraction: float = option(
        0.7,
        "Select this fraction of the clients of each cluster in turn. With select.take one it applies where there is "
        "only one cluster.",
        gt=0,
        le=1,
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        members = tuple(sorted(state.membership))
        turns, here = self._turns(state, members), np.isin(members, state.roster)
        groups = np.array([state.cluster_of(c) for c in members], dtype=np.int64)
        chosen: list[ClientId] = unassigned_clients(state, WITHOUT_SAMPLES_SLOT)
        for k in range(len(state.models) if members else 0):
            inside = np.flatnonzero(groups == k)
            taken, turns[inside] = select_in_turn(
                turns[inside], here[inside], self._num_selected(len(inside), len(state.models))
            )
            chosen += [members[i] for i in inside[taken].tolist()]
        memory = {**state.memory, self.name: ClientTable(members, {"turn": torch.from_numpy(turns)}).to_tree()}
        return replace(state, cohort=tuple(sorted(chosen)), memory=memory if members else state.memory)

    def _num_selected(self, members: int, clusters: int) -> int:
        return 1 if self.per_cluster == "one" and clusters > 1 else num_selected_of(members, self.cluster_fraction)

    def _turns(self, state: ServerState, members: tuple[ClientId, ...]) -> np.ndarray:
        """Who is new stands behind all, in the order of names."""
        known = ClientTable.load(state, self.name)
        turns = known.column("turn", members) if len(known) else np.full(len(members), np.nan)
        new = np.isnan(turns)
        turns[new] = np.nanmax(turns, initial=-1) + 1 + np.arange(new.sum())
        return turns.astype(np.int64)
