"""Which models each client has kept, so that they are not sent to it again.

A plan with `reuse` asks its clients to keep the models of their tasks. The server remembers their digests for each
client that answered; a model whose digest a client has is marked as held, and neither travels nor is booked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from shoal.client_table import ClientTable
from shoal.types import ClientId, Params, Plan, Report, ServerState

MEMORY_SLOT = "delivery"


def digest(model: Params) -> int:
    """Of names, shapes, types and numbers."""
    found = hashlib.blake2b(digest_size=8)
    for name, x in sorted(model.items()):
        found.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little", signed=True)


def mark_cached_models(plan: Plan, state: ServerState) -> Plan:
    """The plan with what its clients have already."""
    if not plan.cache_models:
        return plan
    cache_table = ClientTable.load(state, MEMORY_SLOT)
    cached_digests = (
        dict(zip(cache_table.clients, map(set, cache_table["digests"].tolist()), strict=True))
        if len(cache_table)
        else {}
    )
    digest_by_id: dict[int, int] = {}  # a model goes to many clients: its digest is computed once

    def digest_of(model: Params) -> int:
        if id(model) not in digest_by_id:
            digest_by_id[id(model)] = digest(model)
        return digest_by_id[id(model)]

    tasks = {}
    for client, task in plan.tasks.items():
        digests = {name: digest_of(model) for name, model in task.models.items()}
        held = frozenset(name for name, d in digests.items() if d in cached_digests.get(client, ()))
        tasks[client] = replace(task, digests=digests, cached=held)
    return replace(plan, tasks=tasks)


def remember_sent_models(state: ServerState, plan: Plan, reports: Mapping[ClientId, Report]) -> ServerState:
    """Who answered has the models of its task, and no others; of the silent nothing is known."""
    if not plan.cache_models or not plan.tasks:
        return state
    task_clients = plan.tasks.keys()
    cache_table = ClientTable.load(state, MEMORY_SLOT)
    rows = dict(zip(cache_table.clients, cache_table["digests"].tolist(), strict=True)) if len(cache_table) else {}
    rows = {c: row for c, row in rows.items() if c not in task_clients}
    rows |= {c: list(plan.tasks[c].digests.values()) for c in plan.tasks if c in reports}
    width = max(map(len, rows.values()), default=0)
    table = ClientTable.from_rows(
        {c: {"digests": torch.tensor(row + row[-1:] * (width - len(row)))} for c, row in rows.items()}
    )
    return replace(state, memory={**state.memory, MEMORY_SLOT: table.to_tree()})
