"""The work in Flower's simulation engine (Ray): one actor per core, FedAvg from its own strategies."""

import sys
import time
from pathlib import Path

import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def client_app(folder: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y, order, net = work.held(folder)
        c, r = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        work.train_client(net, x[c], y[c], order[r, c])
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x[c])})}
        return Message(RecordDict(content), reply_to=message)

    return app


def server_app(folder: Path, rounds: int) -> ServerApp:
    app, ends = ServerApp(), []

    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            found = super().aggregate_train(server_round, replies)
            ends.append(time.time())
            return found

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.CLIENTS)
        result = strategy.start(grid, ArrayRecord(work.first(folder)), num_rounds=rounds)
        work.finish(folder, "flower", ends, result.arrays.to_torch_state_dict())

    return app


if __name__ == "__main__":
    given, rounds = Path(sys.argv[1]), int(sys.argv[2])
    run_simulation(
        server_app(given, rounds),
        client_app(given),
        num_supernodes=work.CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
