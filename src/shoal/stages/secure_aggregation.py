"""Training of which the server sees only sums."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from shoal.client.secure_aggregation import (
    FIXED_POINT_ONE,
    KEY,
    KEYS,
    NUM_TRAILING_VALUES,
    SUM,
    UNRESPONSIVE,
    FixedPoint,
    RevealMasks,
    as_bytes,
    draw_mask,
)
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.stages.train import Federate
from shoal.stages.vectors import restored
from shoal.types import ClientId, ClientProgram, Params, Plan, Report, Schedule, ServerState, StagePurpose, Task

log = logging.getLogger(__name__)
PENDING = "sums"


def key_of(known: ClientTable, client: ClientId) -> torch.Tensor:
    return known[KEY][known.clients.index(client)].to(torch.uint8)


def models_of(state: ServerState) -> dict[ClientId, str]:
    """In which model each of the cohort is summed up: that of its group, or the one that there is."""
    names = sorted(state.models)
    return {
        c: names[int(state.membership[c].argmax())] if c in state.membership else names[0]
        for c in state.cohort
        if c in state.membership or len(names) == 1
    }


@dataclass(frozen=True)
class FederateSums(Federate):
    """The cohort trains as usual, and covers what it sends with masks among those who count in the same model. Where
    fewer than `least` with rows would, nobody is asked: a sum of one is no secret. What returns waits for `Unmask`."""

    least: int = 3
    keys: str = KEYS

    def __post_init__(self) -> None:
        if self.least < 2:
            raise UserError(f"secure.least is {self.least}; it must be 2 or more: a sum of one client is no secret")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known, plan = ClientTable.load(state, self.keys), super().plan(state, seed)
        sums = self._sums(state, known)
        if state.cohort and not sums:
            log.warning(
                "round %d: no sum has secure.least=%d clients with rows, so nobody trains; a larger --cohort would do",
                *(state.round + 1, self.least),
            )
        keys = {name: {c: key_of(known, c) for c in members} for name, members in sums.items()}
        tasks = {
            c: replace(
                plan.tasks[c],
                models={**plan.tasks[c].models, KEYS: keys[name]},
                config={**plan.tasks[c].config, "round": float(state.round)},
            )
            for name, members in sums.items()
            for c in members
        }
        return replace(plan, tasks=tasks)

    def _sums(self, state: ServerState, known: ClientTable) -> dict[str, list[ClientId]]:
        found: dict[str, list[ClientId]] = {}
        for client, name in models_of(state).items():
            if client in known.clients and int(known["size"][known.clients.index(client)]) > 0:
                found.setdefault(name, []).append(client)
        return {name: members for name, members in found.items() if len(members) >= self.least}

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        pending: dict[str, dict[str, torch.Tensor]] = {}
        for name, members in self._sums(state, ClientTable.load(state, self.keys)).items():
            told = [c for c in members if c in reports]
            if len(told) < self.least:
                log.warning("round %d: too few answered for a sum; model %r stays as it is", state.round + 1, name)
                continue
            total = np.sum([reports[c].tensors[SUM]["covered"].numpy() for c in told], axis=0, dtype=np.int64)
            there = torch.tensor([c in reports for c in members])
            pending[name] = {
                "total": torch.from_numpy(total),
                **ClientTable(tuple(members), {"there": there}).to_tree(),
            }
        return replace(state, memory={**state.memory, PENDING: pending})


@dataclass(frozen=True)
class Unmask(OneProgram):
    """Takes away everybody's own masks, and those that are left in a sum because somebody did not answer, and makes the
    sum the model's mean. If one of those who are in it is silent now, it cannot be read and the model stays as it
    is."""

    program: ClientProgram = field(default_factory=RevealMasks)
    keys: str = KEYS
    name: str = "unmask"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known = ClientTable.load(state, self.keys)
        tasks: dict[ClientId, Task] = {}
        for sums in state.memory.get(PENDING, {}).values():
            told, silent = _answers(sums)
            keys = {c: key_of(known, c) for c in sorted([*told, *silent])}
            sent = {KEYS: keys} | ({UNRESPONSIVE: {c: keys[c] for c in silent}} if silent else {})
            tasks |= {c: Task(sent, {"round": float(state.round)}, derive_seed(seed, c)) for c in told}
        return Plan(self.program, tasks)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, models, figures = ClientTable.load(state, self.keys), dict(state.models), dict(state.round_metrics)
        loss = np.zeros(2)
        for name, sums in state.memory.get(PENDING, {}).items():
            told, silent = _answers(sums)
            if not all(c in reports for c in told):
                log.warning("round %d: masks of a sum are missing; model %r stays as it is", state.round + 1, name)
                continue
            total = sums["total"].numpy() - self._left(known, told, silent, reports, len(sums["total"]))
            values = torch.from_numpy(total).double() / FIXED_POINT_ONE
            weight, lost, rows, diverged = values[-NUM_TRAILING_VALUES:].tolist()
            loss += (lost, rows)
            if weight > 0 or diverged:  # a model of no numbers is what the loop stops at
                models[name] = self._mean(
                    values[:-NUM_TRAILING_VALUES] / (weight if not diverged else 0.0), state.models[name]
                )
        if loss[1] > 0:
            figures["train.loss"] = float(loss[0] / loss[1])
        memory = {k: v for k, v in state.memory.items() if k != PENDING}
        return replace(state, models=models, round_metrics=figures, memory=memory)

    def _mean(self, values: torch.Tensor, like: Params) -> Params:
        """Whole numbers, such as batch norm's counters, stay as they are."""
        mean = restored(values, like)
        return {k: x if like[k].is_floating_point() else like[k] for k, x in mean.items()}

    def _left(
        self,
        known: ClientTable,
        told: list[ClientId],
        silent: list[ClientId],
        reports: Mapping[ClientId, Report],
        numbers: int,
    ) -> FixedPoint:
        """Own masks of those who are left, and those that they put on towards the silent."""
        left = np.zeros(numbers, dtype=np.int64)
        for c in told:
            left += draw_mask(as_bytes(reports[c].tensors["own"]["seed"]), numbers)
            for other in silent:
                sign = 1 if as_bytes(key_of(known, c)) < as_bytes(key_of(known, other)) else -1
                left += sign * draw_mask(as_bytes(reports[c].tensors["seeds"][other]), numbers)
        return left


def _answers(sums: Mapping[str, torch.Tensor]) -> tuple[list[ClientId], list[ClientId]]:
    """Who sent what is in a sum, and who should have and did not."""
    table = ClientTable.from_tree({k: v for k, v in sums.items() if k != "total"})
    there = dict(zip(table.clients, table["there"].tolist(), strict=True))
    return [c for c in table.clients if there[c]], [c for c in table.clients if not there[c]]
