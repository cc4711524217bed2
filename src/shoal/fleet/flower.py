"""Flower as a fleet: a `Fleet` over Flower's Grid, and a Grid without a network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Protocol

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from shoal.deploy.client_app import client_app
from shoal.deploy.messages import LOST, read_report, task_record
from shoal.errors import UserError
from shoal.types import POOL, ClientData, ClientId, Method, Plan, Report, Task, Tree

log = logging.getLogger(__name__)


class Grid(Protocol):
    """The one verb of Flower's Grid that is used."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]: ...


class FlowerFleet:
    """Clients behind a Grid. `node_of` says which node each client is on; who fails or is late is absent."""

    def __init__(self, grid: Grid, node_of: Mapping[ClientId, int], timeout_s: float | None = 600) -> None:
        self.grid, self.node_of, self.timeout_s = grid, node_of, timeout_s

    def roster(self) -> tuple[ClientId, ...]:
        return tuple(sorted(c for c in self.node_of if c != POOL))

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        if strangers := [c for c in plan.tasks if c not in self.node_of]:
            raise UserError(f"client {strangers[0]!r} is on no node (centralised methods run in simulation only)")
        replies, lost = self._ask(plan.program.name, plan.tasks)
        if lost:  # who has lost what it had kept (a new disk) is sent everything
            log.warning("clients no longer have models that they had kept: %s", ", ".join(lost))
            again, _ = self._ask(plan.program.name, {c: replace(plan.tasks[c], held=frozenset()) for c in lost})
            replies |= again
        return {c: replies[c] for c in plan.tasks if c in replies}  # in the plan's order, not that of arrival

    def _ask(self, program: str, tasks: Mapping[ClientId, Task]) -> tuple[dict[ClientId, Report], list[ClientId]]:
        """What they answered, and who lacks models that its task relies on."""
        client_on = {self.node_of[c]: c for c in tasks}
        messages = [
            Message(content=task_record(program, task), message_type="train", dst_node_id=self.node_of[c])
            for c, task in tasks.items()
        ]
        replies: dict[ClientId, Report] = {}
        lost: list[ClientId] = []
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout_s):
            client = client_on[reply.metadata.src_node_id]
            if reply.has_error():
                log.warning("client %s failed: %s", client, reply.error.reason)
            elif LOST in reply.content.config_records:
                lost.append(client)
            else:
                replies[client] = read_report(reply.content)
        return replies, lost


class LoopGrid:
    """A Grid in this process. Every message passes through Flower's own wire format, both ways."""

    def __init__(self, app: ClientApp, client_on: Mapping[int, ClientId]) -> None:
        self.app, self.client_on = app, client_on
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        for message in messages:
            node = message.metadata.dst_node_id
            config: dict[str, bool | float | int | str] = {"client-id": self.client_on[node]}
            context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            yield _over_the_wire(self.app(_over_the_wire(message), context))


def _over_the_wire(message: Message) -> Message:
    proto = ProtoMessage()
    proto.ParseFromString(message_to_proto(message).SerializeToString())
    return message_from_proto(proto)


def loop_fleet(
    method: Method, data: Mapping[ClientId, ClientData], private: MutableMapping[ClientId, Tree] | None = None
) -> FlowerFleet:
    """The whole of Flower's message path without a network: `--fleet flower`."""
    node_of = {c: 1000 + i for i, c in enumerate([POOL, *sorted(data)])}
    app = client_app(method, data.__getitem__, {} if private is None else private)
    return FlowerFleet(LoopGrid(app, {n: c for c, n in node_of.items()}), node_of)
