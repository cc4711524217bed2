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
from shoal.stages.train import TrainAndAggregate
from shoal.stages.vectors import unflatten_params
from shoal.types import ClientId, ClientProgram, Params, Plan, Report, Schedule, ServerState, StagePurpose, Task

log = logging.getLogger(__name__)
PENDING_SUMS_SLOT = "sums"


def public_key(known: ClientTable, client: ClientId) -> torch.Tensor:
    return known[KEY][known.clients.index(client)].to(torch.uint8)


def model_name_by_client(state: ServerState) -> dict[ClientId, str]:
    """In which model each of the cohort is summed up: that of its group, or the one that there is."""
    names = sorted(state.models)
    return {
        c: names[int(state.membership[c].argmax())] if c in state.membership else names[0]
        for c in state.cohort
        if c in state.membership or len(names) == 1
    }


@dataclass(frozen=True)
class AggregateSecurely(TrainAndAggregate):
    """The cohort trains as usual, and covers what it sends with masks among those who count in the same model. Where
    fewer than `least` with rows would, nobody is asked: a sum of one is no secret. What returns waits for `Unmask`."""

    min_clients: int = 3
    keys_slot: str = KEYS

    def __post_init__(self) -> None:
        if self.min_clients < 2:
            raise UserError(
                f"secure.least is {self.min_clients}; it must be 2 or more: a sum of one client is no secret"
            )

    def plan(self, state: ServerState, seed: int) -> Plan:
        known, plan = ClientTable.load(state, self.keys_slot), super().plan(state, seed)
        sums = self._members_by_model(state, known)
        if state.cohort and not sums:
            log.warning(
                "round %d: no sum has secure.least=%d clients with rows, so nobody trains; a larger --cohort would do",
                *(state.round + 1, self.min_clients),
            )
        keys = {name: {c: public_key(known, c) for c in members} for name, members in sums.items()}
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

    def _members_by_model(self, state: ServerState, known: ClientTable) -> dict[str, list[ClientId]]:
        found: dict[str, list[ClientId]] = {}
        for client, name in model_name_by_client(state).items():
            if client in known.clients and int(known["size"][known.clients.index(client)]) > 0:
                found.setdefault(name, []).append(client)
        return {name: members for name, members in found.items() if len(members) >= self.min_clients}

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        pending: dict[str, dict[str, torch.Tensor]] = {}
        for name, members in self._members_by_model(state, ClientTable.load(state, self.keys_slot)).items():
            responding = [c for c in members if c in reports]
            if len(responding) < self.min_clients:
                log.warning("round %d: too few answered for a sum; model %r stays as it is", state.round + 1, name)
                continue
            total = np.sum([reports[c].tensors[SUM]["covered"].numpy() for c in responding], axis=0, dtype=np.int64)
            has_responded = torch.tensor([c in reports for c in members])
            pending[name] = {
                "total": torch.from_numpy(total),
                **ClientTable(tuple(members), {"there": has_responded}).to_tree(),
            }
        return replace(state, memory={**state.memory, PENDING_SUMS_SLOT: pending})


@dataclass(frozen=True)
class UnmaskSums(OneProgram):
    """Takes away everybody's own masks, and those that are left in a sum because somebody did not answer, and makes the
    sum the model's mean. If one of those who are in it is silent now, it cannot be read and the model stays as it
    is."""

    program: ClientProgram = field(default_factory=RevealMasks)
    keys_slot: str = KEYS
    name: str = "unmask"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        known = ClientTable.load(state, self.keys_slot)
        tasks: dict[ClientId, Task] = {}
        for sums in state.memory.get(PENDING_SUMS_SLOT, {}).values():
            responding, not_responding = _responding_and_not(sums)
            keys = {c: public_key(known, c) for c in sorted([*responding, *not_responding])}
            sent = {KEYS: keys} | ({UNRESPONSIVE: {c: keys[c] for c in not_responding}} if not_responding else {})
            tasks |= {c: Task(sent, {"round": float(state.round)}, derive_seed(seed, c)) for c in responding}
        return Plan(self.program, tasks)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, models, figures = ClientTable.load(state, self.keys_slot), dict(state.models), dict(state.round_metrics)
        loss = np.zeros(2)
        for name, sums in state.memory.get(PENDING_SUMS_SLOT, {}).items():
            responding, not_responding = _responding_and_not(sums)
            if not all(c in reports for c in responding):
                log.warning("round %d: masks of a sum are missing; model %r stays as it is", state.round + 1, name)
                continue
            total = sums["total"].numpy() - self._remaining_masks(
                known, responding, not_responding, reports, len(sums["total"])
            )
            values = torch.from_numpy(total).double() / FIXED_POINT_ONE
            weight, loss_sum, rows, diverged = values[-NUM_TRAILING_VALUES:].tolist()
            loss += (loss_sum, rows)
            if weight > 0 or diverged:  # a model of no numbers is what the loop stops at
                models[name] = self._mean_model(
                    values[:-NUM_TRAILING_VALUES] / (weight if not diverged else 0.0), state.models[name]
                )
        if loss[1] > 0:
            figures["train.loss"] = float(loss[0] / loss[1])
        memory = {k: v for k, v in state.memory.items() if k != PENDING_SUMS_SLOT}
        return replace(state, models=models, round_metrics=figures, memory=memory)

    def _mean_model(self, values: torch.Tensor, template: Params) -> Params:
        """Whole numbers, such as batch norm's counters, stay as they are."""
        mean = unflatten_params(values, template)
        return {k: x if template[k].is_floating_point() else template[k] for k, x in mean.items()}

    def _remaining_masks(
        self,
        known: ClientTable,
        responding: list[ClientId],
        not_responding: list[ClientId],
        reports: Mapping[ClientId, Report],
        num_values: int,
    ) -> FixedPoint:
        """Own masks of those who are left, and those that they put on towards the silent."""
        remaining = np.zeros(num_values, dtype=np.int64)
        for c in responding:
            remaining += draw_mask(as_bytes(reports[c].tensors["own"]["seed"]), num_values)
            for other in not_responding:
                sign = 1 if as_bytes(public_key(known, c)) < as_bytes(public_key(known, other)) else -1
                remaining += sign * draw_mask(as_bytes(reports[c].tensors["seeds"][other]), num_values)
        return remaining


def _responding_and_not(sums: Mapping[str, torch.Tensor]) -> tuple[list[ClientId], list[ClientId]]:
    """Who sent what is in a sum, and who should have and did not."""
    table = ClientTable.from_tree({k: v for k, v in sums.items() if k != "total"})
    there = dict(zip(table.clients, table["there"].tolist(), strict=True))
    return [c for c in table.clients if there[c]], [c for c in table.clients if not there[c]]
