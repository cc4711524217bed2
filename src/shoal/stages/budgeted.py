"""In every group of clients those who train within a time budget, by a bandit over sets (FedEPC's CICS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.bandit import SetBandit, budget, candidates, contexts
from shoal.stages.base import ServerOnly
from shoal.stages.fastest import durations, speeds
from shoal.stages.table import Table
from shoal.types import FIXED, ClientId, Report, ServerState, Tree

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Budgeted(ServerOnly):
    """Context vectors (Eq. 9) from devices and history, sets of clients whose summed time fits the group's budget, the
    set with the best upper confidence bound (Eq. 10-11). A group in which nobody fits sits out and may return.

    A set's reward is how much of its group's loss it took away, by the seconds of its slowest client. `choice=random`
    takes a random set that fits instead: what the bandit must beat.
    """

    choice: Literal["bandit", "random"] = "bandit"
    share: float = 0.16  # of the time of a whole group, that a round may take; its median client always fits
    history: int = 5  # rounds that a client is judged by
    beta_scale: float = 0.2
    patience: float = 0.5
    sets: int = 48
    tolerance: float = 0.0  # a group whose loss changes by less than this share is done; 0: none ever is
    grouped: str = field(default="cluster", metadata=FIXED)
    source: str = field(default="represent", metadata=FIXED)
    trained: str = field(default="train", metadata=FIXED)
    name: str = "select"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"{self.name}.share is {self.share}; it must be above 0 and at most 1")
        if self.history < 1:
            raise UserError(f"{self.name}.history is {self.history}; it must be 1 or more")
        if self.tolerance < 0:
            raise UserError(f"{self.name}.tolerance is {self.tolerance}; it must not be negative")
        self._bandit({})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        grouped = Table.load(state, self.grouped)
        if not len(grouped):
            return state
        memory = state.memory.get(self.name, {})
        history = self._history(state, grouped.clients, Table.read(memory.get("history", {})))
        facts = self._facts(state, grouped, history)
        formed = grouped["formed"][0]
        groups: Tree = memory.get("groups", {}) if torch.equal(memory.get("formed", formed + 1), formed) else {}
        chosen: list[int] = []
        kept: Tree = {}
        experts = grouped["expert"].numpy()
        for expert in np.unique(experts):
            inside = np.flatnonzero(experts == expert)
            entry = self._learned(groups.get(str(expert), {}), history, inside)
            picked = self._picked(
                entry, facts, inside, grouped.present(state.roster)[inside], derive_seed(seed, expert)
            )
            kept[str(expert)] = self._entry(entry, facts, inside[picked], state.round)
            chosen += inside[picked].tolist()
        memory = {"history": history.tree(), "groups": kept, "formed": formed}
        cohort = grouped.named(np.array(sorted(chosen), dtype=np.int64))
        return replace(state, cohort=cohort, memory={**state.memory, self.name: memory})

    def _history(self, state: ServerState, clients: Sequence[ClientId], before: Table) -> Table:
        """Losses and lengths of updates of the last rounds that each client took part in, the newest last, and when
        that was."""
        place = {c: i for i, c in enumerate(before.clients)}
        sent = Table.load(state, self.trained)
        told = {c: i for i, c in enumerate(sent.clients)}
        blank = {"loss": torch.full((self.history + 1,), torch.nan), "norm": torch.full((self.history,), torch.nan)}
        rows = {}
        for c in clients:
            old = {k: before[k][place[c]] for k in before.columns} if c in place else blank | {"last": torch.tensor(-1)}
            if c in told:
                new = {k: torch.cat([old[k][1:], sent[k][told[c]].reshape(1)]) for k in ("loss", "norm")}
                old = {**new, "last": torch.tensor(state.round - 1)}
            rows[c] = old
        return Table.of(rows)

    def _facts(self, state: ServerState, grouped: Table, history: Table) -> dict[str, Floats]:
        size = Table.load(state, self.source).column("size", grouped.clients)
        known = [state.devices.get(c) for c in grouped.clients]
        speed = speeds(state, grouped.clients)
        ram = np.array([float(d.memory_bytes) if d else np.nan for d in known])
        loss, norm = history["loss"].double().numpy(), history["norm"].double().numpy()
        raw = np.stack([speed, ram, size, _mean(norm), _mean(-np.diff(loss, axis=1))], axis=1)  # Eq. (9)
        cost = durations(size, speed)
        waited = (state.round - 1 - history["last"].numpy()).astype(np.float64)
        return {"x": contexts(raw), "cost": cost / max(1e-300, float(cost.mean())), "waited": waited}

    def _learned(self, entry: Tree, history: Table, inside: NDArray[np.int64]) -> Tree:
        """The bandit after the reward of the set that it chose last, if that came back."""
        if "members" not in entry:
            return entry
        took_part = history["last"].numpy()[inside] == int(entry["round"])
        if not took_part.any():
            return entry
        loss = float(history["loss"].double().numpy()[inside, -1][took_part].mean())
        before = float(entry["loss"])
        entry = {**entry, "loss": torch.tensor(loss, dtype=torch.float64)}
        if not np.isfinite(before) or before <= 0:
            return entry
        drop = (before - loss) / before
        bandit = self._bandit(entry)
        bandit.learn(entry["members"].numpy(), drop / max(1e-12, float(entry["slowest"])))
        settled = int(entry["settled"]) + 1 if abs(drop) < self.tolerance else 0
        learned = {k: torch.from_numpy(np.asarray(v)) for k, v in bandit.state().items()}
        return {**entry, "bandit": learned, "settled": torch.tensor(settled)}

    def _picked(
        self, entry: Tree, facts: Mapping[str, Floats], inside: NDArray[np.int64], here: NDArray[np.bool_], seed: int
    ) -> NDArray[np.int64]:
        if int(entry.get("settled", 0)) >= self.history:
            return np.empty(0, dtype=np.int64)
        cost = facts["cost"][inside]
        limit = budget(cost, self.share)
        if self.choice == "random":
            sets = candidates(cost, here, limit, seed, count=1)
            return np.flatnonzero(sets[0]) if len(sets) else np.empty(0, dtype=np.int64)
        return self._bandit(entry).choose(facts["x"][inside], cost, here, limit, seed, facts["waited"][inside])

    def _entry(self, entry: Tree, facts: Mapping[str, Floats], picked: NDArray[np.int64], round: int) -> Tree:
        """What there is to remember of a group until its reward is known."""
        if not len(picked):
            return {k: v for k, v in entry.items() if k != "members"}
        first = {"loss": torch.tensor(torch.nan, dtype=torch.float64), "settled": torch.tensor(0)}
        chosen = {
            "members": torch.from_numpy(facts["x"][picked]),
            "slowest": torch.tensor(facts["cost"][picked].max()),
            "round": torch.tensor(round),
        }
        return first | entry | chosen

    def _bandit(self, entry: Tree) -> SetBandit:
        bandit = SetBandit(beta_scale=self.beta_scale, patience=self.patience, count=self.sets)
        return bandit.load({k: v.numpy() for k, v in entry["bandit"].items()}) if "bandit" in entry else bandit


def _mean(values: Floats) -> Floats:
    """Over what is known of each client; NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
