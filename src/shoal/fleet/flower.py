"""Flower as a fleet: tasks and reports as messages, a `Fleet` over a Grid, a ClientApp over programs.

The only module that imports flwr. What travels is `shoal.codec`'s bytes in an array of Flower's, so the
ledger's count is the length of what was sent, and Flower cuts large models into chunks as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from shoal.client.evaluate import Evaluate
from shoal.codec import MissingModel, decode_report, decode_task, encode_report, encode_task
from shoal.errors import UserError
from shoal.fleet.plain import run_one
from shoal.fleet.tracing import Recorder
from shoal.types import POOL, ClientData, ClientId, ClientProgram, Method, Params, Plan, Report, Task, Tree

log = logging.getLogger(__name__)

LOST = "lost"


def _envelope(data: bytes, program: str) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype="shoal.safetensors", data=data)
    return RecordDict({"payload": ArrayRecord({"data": array}), "shoal": ConfigRecord({"program": program})})


def _payload(content: RecordDict) -> bytes:
    return content.array_records["payload"]["data"].data


def task_record(program: str, task: Task) -> RecordDict:
    return _envelope(encode_task(task), program)


def read_task(content: RecordDict, kept: Mapping[int, Params] | None = None) -> tuple[str, Task]:
    return str(content.config_records["shoal"]["program"]), decode_task(_payload(content), kept)


def report_record(program: str, report: Report) -> RecordDict:
    return _envelope(encode_report(report), program)


def read_report(content: RecordDict) -> Report:
    return decode_report(_payload(content))


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


def client_programs(method: Method) -> dict[str, ClientProgram]:
    evaluate = Evaluate.of(method)
    return method.programs | {evaluate.name: evaluate}


def client_app(
    method: Method,
    load_data: Callable[[ClientId], ClientData],
    private: MutableMapping[ClientId, Tree],
) -> ClientApp:
    """What runs on a client: it is told by `client-id` in its node's config who it is."""
    programs = client_programs(method)
    app, recorder = ClientApp(), Recorder()
    models: dict[ClientId, dict[int, Params]] = {}  # those of the last task that said to keep them, by digest

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = str(context.node_config["client-id"])
        try:
            name, task = read_task(message.content, models.get(client))
        except MissingModel:
            return Message(content=RecordDict({LOST: ConfigRecord({})}), reply_to=message)
        if task.digests:
            models[client] = {digest: task.models[k] for k, digest in task.digests.items()}
        report, kept = run_one(programs[name], task, load_data(client), private.get(client, {}), recorder)
        if kept is not None:
            private[client] = {**private.get(client, {}), **kept}
        return Message(content=report_record(name, report), reply_to=message)

    return app


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
