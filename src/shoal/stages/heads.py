"""The server collects the heads of all clients and sends every client all of them (PM-MoE)."""

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
    """Collects the heads of the clients. A client that does not respond keeps the head that it sent last."""

    program: ClientProgram
    rounds: int
    every_rounds: int
    name: str = HEADS

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(self.program, {c: Task({}, {}, derive_seed(seed, c)) for c in state.roster})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        heads = {c: {"head": flatten_params(r.tensors["head"])} for c, r in reports.items() if "head" in r.tensors}
        collected = ClientTable.load(state, self.name).updated_with(ClientTable.from_rows(heads))
        return replace(state, memory={**state.memory, self.name: collected.to_tree()})


def heads_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the base, the first head and the stacked heads of all other clients.

    A client without a head of its own gets no heads of others, because it cannot use them.
    """
    base = state.models["base"]
    first = tree.to_device(state.memory["train"]["head"], next(iter(base.values())).device)
    models = {"base": base, "head": first}
    collected = ClientTable.load(state, HEADS)
    other_heads = (
        [row for row, c in zip(collected["head"], collected.clients, strict=True) if c != client]
        if len(collected)
        else []
    )
    if client not in collected.clients or not other_heads:
        return models
    heads = [unflatten_params(row, first) for row in other_heads]
    return models | {"heads": {k: torch.stack([head[k] for head in heads]) for k in first}}
