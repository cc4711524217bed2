"""What runs on a client: a Flower ClientApp over the client programs of a method."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from shoal.client.evaluate import Evaluate
from shoal.codec import MissingModel
from shoal.fleet.messages import MODELS_MISSING, read_task, report_record
from shoal.fleet.plain import run_program
from shoal.fleet.tracing import Recorder
from shoal.types import ClientData, ClientId, ClientProgram, Method, Params, Tree


def client_programs(method: Method) -> dict[str, ClientProgram]:
    evaluate = Evaluate.for_method(method)
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
            return Message(content=RecordDict({MODELS_MISSING: ConfigRecord({})}), reply_to=message)
        if task.digests:
            models[client] = {digest: task.models[k] for k, digest in task.digests.items()}
        report, kept = run_program(programs[name], task, load_data(client), private.get(client, {}), recorder)
        if kept is not None:
            private[client] = {**private.get(client, {}), **kept}
        return Message(content=report_record(name, report), reply_to=message)

    return app
