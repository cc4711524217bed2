"""Flower as a fleet: a `Fleet` over Flower's Grid. `shoal.deploy` has what runs on the clients."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from flwr.app import Message

from shoal.errors import UserError
from shoal.fleet.messages import MODELS_MISSING, read_report, task_record
from shoal.types import CENTRALISED_CLIENT, ClientId, Plan, Report, Task

log = logging.getLogger(__name__)


class Grid(Protocol):
    """The one verb of Flower's Grid that is used."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]: ...


class FlowerFleet:
    """Clients behind a Grid. `node_of` says which node each client is on; who fails or is late is absent."""

    def __init__(self, grid: Grid, node_of: Mapping[ClientId, int], timeout_s: float | None = 600) -> None:
        self.grid, self.node_of, self.timeout_s = grid, node_of, timeout_s

    def roster(self) -> tuple[ClientId, ...]:
        return tuple(sorted(c for c in self.node_of if c != CENTRALISED_CLIENT))

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        if unknown_clients := [c for c in plan.tasks if c not in self.node_of]:
            raise UserError(f"client {unknown_clients[0]!r} is on no node (centralised methods run in simulation only)")
        replies, without_cache = self._send_tasks(plan.program.name, plan.tasks)
        if without_cache:  # who has lost what it had kept (a new disk) is sent everything
            log.warning("clients no longer have models that they had kept: %s", ", ".join(without_cache))
            again, _ = self._send_tasks(
                plan.program.name, {c: replace(plan.tasks[c], cached=frozenset()) for c in without_cache}
            )
            replies |= again
        return {c: replies[c] for c in plan.tasks if c in replies}  # in the plan's order, not that of arrival

    def _send_tasks(
        self, program: str, tasks: Mapping[ClientId, Task]
    ) -> tuple[dict[ClientId, Report], list[ClientId]]:
        """What they answered, and who lacks models that its task relies on."""
        client_on = {self.node_of[c]: c for c in tasks}
        messages = [
            Message(content=task_record(program, task), message_type="train", dst_node_id=self.node_of[c])
            for c, task in tasks.items()
        ]
        replies: dict[ClientId, Report] = {}
        without_cache: list[ClientId] = []
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout_s):
            client = client_on[reply.metadata.src_node_id]
            if reply.has_error():
                log.warning("client %s failed: %s", client, reply.error.reason)
            elif MODELS_MISSING in reply.content.config_records:
                without_cache.append(client)
            else:
                replies[client] = read_report(reply.content)
        return replies, without_cache
