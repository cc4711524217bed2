"""Avoids sending models to clients that have cached them already.

If a plan has `cache_models`, its clients cache the models of their tasks. The server remembers the digests of these
models for each client that reported. A model whose digest a client has is marked as cached in the client's next task.
It is not sent, and the ledger counts no bytes for it.
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
    """Returns a digest of the names, shapes, types and values of a model, as a signed integer of 64 bits."""
    content_hash = hashlib.blake2b(digest_size=8)
    for name, x in sorted(model.items()):
        content_hash.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        content_hash.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(content_hash.digest(), "little", signed=True)


def mark_cached_models(plan: Plan, state: ServerState) -> Plan:
    """Returns the plan with the digests of its models, and with the models marked that a client has cached."""
    if not plan.cache_models:
        return plan
    digests_by_client = ClientTable.load(state, MEMORY_SLOT).to_dict("digests")
    digest_by_id: dict[int, int] = {}  # by identity, because many clients receive the same model

    def digest_of(model: Params) -> int:
        if id(model) not in digest_by_id:
            digest_by_id[id(model)] = digest(model)
        return digest_by_id[id(model)]

    tasks = {}
    for client, task in plan.tasks.items():
        digests = {name: digest_of(model) for name, model in task.models.items()}
        cached = frozenset(name for name, d in digests.items() if d in digests_by_client.get(client, ()))
        tasks[client] = replace(task, digests=digests, cached=cached)
    return replace(plan, tasks=tasks)


def remember_sent_models(state: ServerState, plan: Plan, reports: Mapping[ClientId, Report]) -> ServerState:
    """Returns the state with the digests that each client has cached after its report.

    A client that reported has cached the models of its last task and no others. Nothing is known about the cache of a
    client that did not respond, so it is sent all models next time.
    """
    if not plan.cache_models or not plan.tasks:
        return state
    digests_by_client = ClientTable.load(state, MEMORY_SLOT).to_dict("digests")
    rows = {c: row for c, row in digests_by_client.items() if c not in plan.tasks}
    rows |= {c: list(plan.tasks[c].digests.values()) for c in plan.tasks if c in reports}
    # All rows of a table have the same width, so shorter ones repeat their last digest.
    width = max(map(len, rows.values()), default=0)
    table = ClientTable.from_rows(
        {c: {"digests": torch.tensor(row + row[-1:] * (width - len(row)))} for c, row in rows.items()}
    )
    return replace(state, memory={**state.memory, MEMORY_SLOT: table.to_tree()})
