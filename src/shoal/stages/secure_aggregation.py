"""Secure aggregation: the server learns only the sum of the updates of several clients.

`shoal.client.secure_aggregation` has the programs of the clients and the masks.
"""

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


def public_key(reported: ClientTable, client: ClientId) -> torch.Tensor:
    """Returns the public key that the client reported."""
    return reported[KEY][reported.clients.index(client)].to(torch.uint8)


def model_name_by_client(state: ServerState) -> dict[ClientId, str]:
    """Returns the model whose sum each client of the cohort is part of: that of its cluster, or the only one."""
    names = sorted(state.models)
    return {
        c: names[int(state.membership[c].argmax())] if c in state.membership else names[0]
        for c in state.cohort
        if c in state.membership or len(names) == 1
    }


@dataclass(frozen=True)
class AggregateSecurely(TrainAndAggregate):
    """Trains the cohort and adds up the masked models of the clients of each sum.

    Clients of the same model mask their reports for each other. If fewer than `min_clients` clients with samples would
    be part of a sum, none of them trains, because a sum of one client protects nothing. `UnmaskSums` reads the sums.
    """

    min_clients: int = 3
    keys_slot: str = KEYS

    def __post_init__(self) -> None:
        if self.min_clients < 2:
            raise UserError(
                f"secure.min_clients is {self.min_clients}; it must be 2 or more, because a sum of one client protects "
                "nothing"
            )

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported, plan = ClientTable.load(state, self.keys_slot), super().plan(state, seed)
        sums = self._members_by_model(state, reported)
        if state.cohort and not sums:
            log.warning(
                "Round %d trains no model, because no sum would have secure.min_clients=%d clients with samples. Use a "
                "larger --cohort.",
                *(state.round + 1, self.min_clients),
            )
        keys = {name: {c: public_key(reported, c) for c in members} for name, members in sums.items()}
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

    def _members_by_model(self, state: ServerState, reported: ClientTable) -> dict[str, list[ClientId]]:
        members_by_model: dict[str, list[ClientId]] = {}
        for client, name in model_name_by_client(state).items():
            if client in reported.clients and int(reported["size"][reported.clients.index(client)]) > 0:
                members_by_model.setdefault(name, []).append(client)
        return {name: members for name, members in members_by_model.items() if len(members) >= self.min_clients}

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        pending: dict[str, dict[str, torch.Tensor]] = {}
        for name, members in self._members_by_model(state, ClientTable.load(state, self.keys_slot)).items():
            responding = [c for c in members if c in reports]
            if len(responding) < self.min_clients:
                log.warning(
                    "Round %d: too few clients reported for the sum of model %r, which does not change.",
                    state.round + 1,
                    name,
                )
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
    """Removes the masks from each sum and sets the model to the mean.

    These are the clients' own masks and the masks that clients share with clients that did not respond. If a client of
    the sum does not respond now, the sum cannot be read, and the model does not change.
    """

    program: ClientProgram = field(default_factory=RevealMasks)
    keys_slot: str = KEYS
    name: str = "unmask"
    purpose: ClassVar[StagePurpose] = "training"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported = ClientTable.load(state, self.keys_slot)
        tasks: dict[ClientId, Task] = {}
        for sums in state.memory.get(PENDING_SUMS_SLOT, {}).values():
            responding, not_responding = _responding_and_not(sums)
            keys = {c: public_key(reported, c) for c in sorted([*responding, *not_responding])}
            sent = {KEYS: keys} | ({UNRESPONSIVE: {c: keys[c] for c in not_responding}} if not_responding else {})
            tasks |= {c: Task(sent, {"round": float(state.round)}, derive_seed(seed, c)) for c in responding}
        return Plan(self.program, tasks)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reported, models, metrics = (
            ClientTable.load(state, self.keys_slot),
            dict(state.models),
            dict(state.round_metrics),
        )
        loss = np.zeros(2)
        for name, sums in state.memory.get(PENDING_SUMS_SLOT, {}).items():
            responding, not_responding = _responding_and_not(sums)
            if not all(c in reports for c in responding):
                log.warning(
                    "Round %d: a client of the sum of model %r did not reveal its mask, so the model does not change.",
                    state.round + 1,
                    name,
                )
                continue
            total = sums["total"].numpy() - self._remaining_masks(
                reported, responding, not_responding, reports, len(sums["total"])
            )
            values = torch.from_numpy(total).double() / FIXED_POINT_ONE
            weight, loss_sum, num_samples, diverged = values[-NUM_TRAILING_VALUES:].tolist()
            loss += (loss_sum, num_samples)
            if weight > 0 or diverged:  # a model of NaN, at which the engine stops the run
                models[name] = self._mean_model(
                    values[:-NUM_TRAILING_VALUES] / (weight if not diverged else 0.0), state.models[name]
                )
        if loss[1] > 0:
            metrics["train.loss"] = float(loss[0] / loss[1])
        memory = {k: v for k, v in state.memory.items() if k != PENDING_SUMS_SLOT}
        return replace(state, models=models, round_metrics=metrics, memory=memory)

    def _mean_model(self, values: torch.Tensor, template: Params) -> Params:
        """Returns the mean as parameters. Integers, such as the counters of batch norm, do not change."""
        mean = unflatten_params(values, template)
        return {k: x if template[k].is_floating_point() else template[k] for k, x in mean.items()}

    def _remaining_masks(
        self,
        reported: ClientTable,
        responding: list[ClientId],
        not_responding: list[ClientId],
        reports: Mapping[ClientId, Report],
        num_values: int,
    ) -> FixedPoint:
        """Returns the sum of the responding clients' own masks and of their masks for clients that did not respond."""
        remaining = np.zeros(num_values, dtype=np.int64)
        for c in responding:
            remaining += draw_mask(as_bytes(reports[c].tensors["own"]["seed"]), num_values)
            for other in not_responding:
                sign = 1 if as_bytes(public_key(reported, c)) < as_bytes(public_key(reported, other)) else -1
                remaining += sign * draw_mask(as_bytes(reports[c].tensors["seeds"][other]), num_values)
        return remaining


def _responding_and_not(sums: Mapping[str, torch.Tensor]) -> tuple[list[ClientId], list[ClientId]]:
    """Returns the clients whose reports are in a sum, and the clients that did not respond."""
    table = ClientTable.from_tree({k: v for k, v in sums.items() if k != "total"})
    has_responded = table.to_dict("there")
    return [c for c in table.clients if has_responded[c]], [c for c in table.clients if not has_responded[c]]
