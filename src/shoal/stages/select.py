"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed, generator
from shoal.selectors.choice import by_size, largest
from shoal.stages.base import OneProgram, ServerOnly
from shoal.table import Table
from shoal.types import FIXED, POOL, ClientId, ClientProgram, ModelsFor, Plan, Report, Schedule, ServerState, Task

Rows = NDArray[np.int64]
SIZES = "sizes"  # the stage in which clients tell how many rows they hold


@dataclass(frozen=True)
class Random(ServerOnly):
    """`size` distinct clients by chance; a smaller roster takes part whole. Sizes are those that clients have told."""

    size: int = field(metadata=FIXED)  # of the run: --cohort
    by: Literal["uniform", "size"] = "uniform"  # every client alike, or likelier the more rows it holds
    name: str = "select"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"cohort is {self.size}; it must be 1 client or more")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if self.by == "size":
            known = Table.load(state, SIZES)
            return replace(state, cohort=known.named(_by_size(known, state.roster, self.size, seed)))
        order = torch.randperm(len(state.roster), generator=generator(seed))[: self.size]
        return replace(state, cohort=tuple(state.roster[i] for i in sorted(order.tolist())))


@dataclass(frozen=True)
class Pooled(ServerOnly):
    """The one who holds everybody's data: what federation gives up."""

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, cohort=(POOL,))


def _by_size(known: Table, roster: Sequence[ClientId], count: int, seed: int) -> Rows:
    if not len(known):
        return np.empty(0, dtype=np.int64)  # nobody has told anything yet
    return by_size(known["size"].double().numpy(), known.present(roster), count, seed)


@dataclass(frozen=True)
class FromGroups(ServerOnly):
    """`size` clients chosen by the groups they are in."""

    rule: Callable[[Rows, NDArray[np.bool_], int, int], Rows]  # (group of each, who is there, how many, seed)
    size: int = field(metadata=FIXED)
    source: str = field(default="cluster", metadata=FIXED)
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        grouped = Table.load(state, self.source)
        if not len(grouped):
            return state  # nobody has told anything yet
        chosen = self.rule(grouped["group"].numpy(), grouped.present(state.roster), self.size, seed)
        return replace(state, cohort=grouped.named(chosen))


@dataclass(frozen=True)
class LargestLoss(OneProgram):
    """Power of choice: candidates, likelier the more rows they have, tell their loss; the largest take part."""

    program: ClientProgram
    models_for: ModelsFor
    size: int = field(metadata=FIXED)
    candidates: int = 0  # 0: twice the cohort
    name: str = "select"
    schedule: ClassVar[Schedule] = Schedule("candidates")

    def __post_init__(self) -> None:
        if self.candidates and self.candidates < self.size:
            raise UserError(f"select.candidates is {self.candidates}; it must be 0 or at least the cohort, {self.size}")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known = Table.load(state, SIZES)
        asked = known.named(_by_size(known, state.roster, self.candidates or 2 * self.size, seed))
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in asked})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clients = tuple(sorted(reports))
        losses = np.array(
            [total / rows if rows else np.nan for total, rows in (reports[c].metrics["loss"] for c in clients)]
        )
        chosen = largest(losses, np.ones(len(clients), dtype=bool), self.size)
        return replace(state, cohort=tuple(clients[i] for i in chosen.tolist()))
