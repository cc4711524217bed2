"""The Flower ClientApp that runs the client programs of a method on a real client."""

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
    """Returns the programs of a method and the evaluation, by name."""
    evaluate = Evaluate.for_method(method)
    return method.programs | {evaluate.name: evaluate}


def client_app(
    method: Method,
    load_data: Callable[[ClientId], ClientData],
    private: MutableMapping[ClientId, Tree],
) -> ClientApp:
    """Returns the Flower app that runs on a client.

    Parameters
    ----------
    method
        The method. Server and clients must build it with the same settings.
    load_data
        Returns the data of a client. The app reads the name of its client from `client-id` in the config of its node.
    private
        The private trees by client, which the app updates.

    Returns
    -------
    ClientApp
        The app.
    """
    programs = client_programs(method)
    app, recorder = ClientApp(), Recorder()
    cached_models: dict[ClientId, dict[int, Params]] = {}  # of the last task with digests, by digest

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = str(context.node_config["client-id"])
        try:
            name, task = read_task(message.content, cached_models.get(client))
        except MissingModel:
            return Message(content=RecordDict({MODELS_MISSING: ConfigRecord({})}), reply_to=message)
        if task.digests:
            cached_models[client] = {digest: task.models[k] for k, digest in task.digests.items()}
        report, new_private = run_program(programs[name], task, load_data(client), private.get(client, {}), recorder)
        if new_private is not None:
            private[client] = {**private.get(client, {}), **new_private}
        return Message(content=report_record(name, report), reply_to=message)

    return app
