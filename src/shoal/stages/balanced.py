"""Clients chosen so that a round's rows hold all classes alike, and what models were thereby taught."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.client.prior import mixed_prior
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.balanced import concentration, flattest
from shoal.stages.base import ServerOnly
from shoal.table import Table
from shoal.types import FIXED, ClientId, Report, ServerState

TOLD, TAUGHT = "represent", "taught"


def label_counts(known: Table) -> NDArray[np.float64]:
    """Of each client, as far as it told: its label distribution times its rows."""
    counts: NDArray[np.float64] = (known["labels"].double() * known["size"].double()[:, None]).numpy()
    return counts


@dataclass(frozen=True)
class Balanced(ServerOnly):
    """The cohort with the flattest label counts of all. `waiting` is the share of it that has waited longest and is
    taken whatever it holds. Where there are groups, each has its share of the cohort, and is balanced by itself. Of
    every round it tells how flat the cohort is: 1/classes where all classes are alike."""

    size: int = field(metadata=FIXED)
    waiting: float = 0.5
    source: str = field(default=TOLD, metadata=FIXED)
    name: str = "select"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"cohort is {self.size}; it must be 1 client or more")
        if not 0 <= self.waiting <= 1:
            raise UserError(f"{self.name}.waiting is {self.waiting}; it must be from 0 to 1")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known = Table.load(state, self.source)
        if not len(known):
            return state  # nobody has told anything yet
        counts, there = label_counts(known), known.present(state.roster)
        last = Table.load(state, self.name).column("last", known.clients)
        last = np.where(np.isnan(last), -1, last)
        parts = _shares(_groups(state, known), there, self.size)
        chosen = np.concatenate(
            [flattest(counts, last, inside, k, self.waiting, derive_seed(seed, g)) for g, (inside, k) in parts.items()]
        )
        rows = np.sort(chosen.astype(np.int64))
        last[rows] = state.round
        kept = Table(known.clients, {"last": torch.from_numpy(last).long()})
        return replace(
            state,
            cohort=known.named(rows),
            memory={**state.memory, self.name: kept.tree()},
            figures={**state.figures, f"{self.name}.concentration": float(concentration(counts[rows].sum(0)))},
        )


def _groups(state: ServerState, known: Table) -> NDArray[np.int64]:
    """The group of each client; -1 of whoever is in none."""
    return np.array([int(state.membership[c].argmax()) if c in state.membership else -1 for c in known.clients])


def _shares(groups: NDArray[np.int64], there: NDArray[np.bool_], size: int) -> dict[int, tuple[NDArray[np.bool_], int]]:
    """Who is there of each group, and how many of them take part: by their number, the rest to the largest remainders,
    the lower group first."""
    insides = {int(g): (groups == g) & there for g in np.unique(groups)}
    total = max(1, int(there.sum()))
    wanted = {g: min(size, total) * int(inside.sum()) / total for g, inside in insides.items()}
    shares = {g: int(w + 1e-9) for g, w in wanted.items()}
    rest = min(size, int(there.sum())) - sum(shares.values())
    for g in sorted(wanted, key=lambda g: (shares[g] - wanted[g], g))[:rest]:
        shares[g] += 1
    return {g: (inside, shares[g]) for g, inside in insides.items()}


@dataclass(frozen=True)
class Taught(ServerOnly):
    """How often each class has been trained on, over all rounds. A model's answers lean towards what it saw often, and
    who knows the frequencies can take this away again. A loss that is adjusted by a client's prior, mixed with `lam` of
    equal classes, has taken most of it away already: what is left of a class is its frequency over that prior."""

    lam: float  # 1: the loss is not adjusted
    source: str = TOLD
    name: str = TAUGHT

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known = Table.load(state, self.source)
        took_part = known.where(known.present(state.cohort)) if len(known) else known
        if not len(took_part):
            return state
        counts = torch.from_numpy(label_counts(took_part))
        seen = (counts / mixed_prior(counts, self.lam)).sum(0)  # [classes]
        before = state.memory.get(self.name, {}).get("counts", torch.zeros_like(seen))
        return replace(state, memory={**state.memory, self.name: {"counts": before + seen}})


def taught(state: ServerState, slot: str = TAUGHT) -> Tensor | None:
    """The prior that answers lean towards, where it is known: no class is unheard of."""
    counts = state.memory.get(slot, {}).get("counts")
    if counts is None or not float(counts.sum()):
        return None
    found: Tensor = mixed_prior(counts, 0.001).float()
    return found
