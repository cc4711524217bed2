"""A fleet of real clients over Flower's Grid.

`shoal.fleet.messages` has the messages, and `shoal.deploy` the program that runs on the clients.
"""

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
    """The only method of Flower's Grid that the fleet uses."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]: ...


class FlowerFleet:
    """Executes plans on the clients behind a Grid.

    Parameters
    ----------
    grid
        Flower's Grid.
    node_of
        The node of each client.
    timeout_s
        Seconds to wait for reports. A client that fails or reports later is absent from the reports.
    """

    def __init__(self, grid: Grid, node_of: Mapping[ClientId, int], timeout_s: float | None = 600) -> None:
        self.grid, self.node_of, self.timeout_s = grid, node_of, timeout_s

    def roster(self) -> tuple[ClientId, ...]:
        """Returns the clients that have a node."""
        return tuple(sorted(c for c in self.node_of if c != CENTRALISED_CLIENT))

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Sends the tasks and returns the reports, in the order of the plan.

        A client that has lost its cached models, for example with a new disk, is sent its task again with all models.

        Raises
        ------
        UserError
            If a client of the plan has no node.
        """
        assert plan.program is not None
        if unknown_clients := [c for c in plan.tasks if c not in self.node_of]:
            raise UserError(f"client {unknown_clients[0]!r} is on no node (centralised methods run in simulation only)")
        replies, without_cache = self._send_tasks(plan.program.name, plan.tasks)
        if without_cache:
            log.warning("These clients no longer have their cached models: %s.", ", ".join(without_cache))
            complete_tasks = {c: replace(plan.tasks[c], cached=frozenset()) for c in without_cache}
            replies |= self._send_tasks(plan.program.name, complete_tasks)[0]
        return {c: replies[c] for c in plan.tasks if c in replies}

    def _send_tasks(
        self, program: str, tasks: Mapping[ClientId, Task]
    ) -> tuple[dict[ClientId, Report], list[ClientId]]:
        """Returns the reports, and the clients that lack models that the server expects to be cached."""
        client_of_node = {self.node_of[c]: c for c in tasks}
        messages = [
            Message(content=task_record(program, task), message_type="train", dst_node_id=self.node_of[c])
            for c, task in tasks.items()
        ]
        replies: dict[ClientId, Report] = {}
        without_cache: list[ClientId] = []
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout_s):
            client = client_of_node[reply.metadata.src_node_id]
            if reply.has_error():
                log.warning("Client %s failed: %s", client, reply.error.reason)
            elif MODELS_MISSING in reply.content.config_records:
                without_cache.append(client)
            else:
                try:
                    replies[client] = read_report(reply.content)
                except UserError as error:  # a client can send any bytes, which must not end the run of all others
                    log.warning("The report of client %s is refused: %s", client, error)
        return replies, without_cache
