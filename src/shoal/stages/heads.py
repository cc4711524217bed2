"""Clients' heads in one place, and all of them for each client (PM-MoE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shoal import tree
from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.base import DueWhenEvaluated, OneProgram
from shoal.stages.vectors import flatten_params, unflatten_params
from shoal.types import ClientId, ClientProgram, Params, Plan, Report, ServerState, Task

HEADS = "heads"


@dataclass(frozen=True)
class GatherHeads(OneProgram, DueWhenEvaluated):
    """Everybody who has trained a head tells it; of the silent the last one is kept."""

    program: ClientProgram
    rounds: int
    every_rounds: int
    name: str = HEADS

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(self.program, {c: Task({}, {}, derive_seed(seed, c)) for c in state.roster})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        told = {c: {"head": flatten_params(r.tensors["head"])} for c, r in reports.items() if "head" in r.tensors}
        known = ClientTable.load(state, self.name).updated_with(ClientTable.from_rows(told))
        return replace(state, memory={**state.memory, self.name: known.to_tree()})


def heads_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The base, the first head, and the heads of all others, stacked. A client without a head of its own has no use for
    them."""
    base = state.models["base"]
    first = tree.to_device(state.memory["train"]["head"], next(iter(base.values())).device)
    models = {"base": base, "head": first}
    known = ClientTable.load(state, HEADS)
    rows = [row for row, c in zip(known["head"], known.clients, strict=True) if c != client] if len(known) else []
    if client not in known.clients or not rows:
        return models
    heads = [unflatten_params(row, first) for row in rows]
    return models | {"heads": {k: torch.stack([head[k] for head in heads]) for k in first}}
