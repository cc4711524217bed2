"""Which models each client has kept, so that they are not sent to it again.

A plan with `reuse` asks its clients to keep the models of their tasks. The server remembers their digests for each
client that answered; a model whose digest a client has is marked as held, and neither travels nor is booked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from shoal.client_table import Table
from shoal.types import ClientId, Params, Plan, Report, ServerState

SLOT = "delivery"


def digest(model: Params) -> int:
    """Of names, shapes, types and numbers."""
    found = hashlib.blake2b(digest_size=8)
    for name, x in sorted(model.items()):
        found.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little", signed=True)


def marked(plan: Plan, state: ServerState) -> Plan:
    """The plan with what its clients have already."""
    if not plan.reuse:
        return plan
    kept = Table.load(state, SLOT)
    have = dict(zip(kept.clients, map(set, kept["digests"].tolist()), strict=True)) if len(kept) else {}
    known: dict[int, int] = {}  # a model goes to many clients: its digest is computed once

    def of(model: Params) -> int:
        if id(model) not in known:
            known[id(model)] = digest(model)
        return known[id(model)]

    tasks = {}
    for client, task in plan.tasks.items():
        digests = {name: of(model) for name, model in task.models.items()}
        held = frozenset(name for name, d in digests.items() if d in have.get(client, ()))
        tasks[client] = replace(task, digests=digests, held=held)
    return replace(plan, tasks=tasks)


def noted(state: ServerState, plan: Plan, reports: Mapping[ClientId, Report]) -> ServerState:
    """Who answered has the models of its task, and no others; of the silent nothing is known."""
    if not plan.reuse or not plan.tasks:
        return state
    asked = plan.tasks.keys()
    kept = Table.load(state, SLOT)
    rows = dict(zip(kept.clients, kept["digests"].tolist(), strict=True)) if len(kept) else {}
    rows = {c: row for c, row in rows.items() if c not in asked}
    rows |= {c: list(plan.tasks[c].digests.values()) for c in plan.tasks if c in reports}
    width = max(map(len, rows.values()), default=0)
    table = Table.of({c: {"digests": torch.tensor(row + row[-1:] * (width - len(row)))} for c, row in rows.items()})
    return replace(state, memory={**state.memory, SLOT: table.tree()})
