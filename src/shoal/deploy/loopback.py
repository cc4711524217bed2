"""Flower without a network: a Grid in this process that passes every message through Flower's wire format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from shoal.deploy.client_app import client_app
from shoal.fleet.flower import FlowerFleet
from shoal.types import CENTRALISED_CLIENT, ClientData, ClientId, Method, Tree


class LoopGrid:
    """A Grid in this process. Every message passes through Flower's wire format in both directions."""

    def __init__(self, app: ClientApp, client_of_node: Mapping[int, ClientId]) -> None:
        self.app, self.client_of_node = app, client_of_node
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Runs the app for every message and yields the replies."""
        for message in messages:
            node = message.metadata.dst_node_id
            config: dict[str, bool | float | int | str] = {"client-id": self.client_of_node[node]}
            context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            yield _over_the_wire(self.app(_over_the_wire(message), context))


def _over_the_wire(message: Message) -> Message:
    proto = ProtoMessage()
    proto.ParseFromString(message_to_proto(message).SerializeToString())
    return message_from_proto(proto)


def loopback_fleet(
    method: Method, data: Mapping[ClientId, ClientData], private: MutableMapping[ClientId, Tree] | None = None
) -> FlowerFleet:
    """Returns a fleet with the complete message path of Flower, but without a network (`--fleet flower`)."""
    node_of = {c: 1000 + i for i, c in enumerate([CENTRALISED_CLIENT, *sorted(data)])}
    app = client_app(method, data.__getitem__, {} if private is None else private)
    return FlowerFleet(LoopGrid(app, {n: c for c, n in node_of.items()}), node_of)
