"""The work in Flower's simulation engine (Ray), FedAvg from its own strategies.

A fourth argument sets the CPUs per client: with 1, as many clients run at a time as there are cores. Without it
Flower uses its default, which is 2.
"""

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
        x, y, order, net = work.load_cached(folder)
        c, r = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        work.train_client(net, x[c], y[c], order[r, c])
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x[c])})}
        return Message(RecordDict(content), reply_to=message)

    return app


def server_app(folder: Path, rounds: int, name: str) -> ServerApp:
    app, ends = ServerApp(), []

    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):
            result = super().aggregate_train(server_round, replies)
            ends.append(time.time())
            return result

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.load_work(folder).clients)
        result = strategy.start(grid, ArrayRecord(work.load_first_weights(folder)), num_rounds=rounds)
        work.write_result(folder, name, ends, result.arrays.to_torch_state_dict())

    return app


if __name__ == "__main__":
    path, rounds, name, *cpus = sys.argv[1:]
    folder = Path(path)
    run_simulation(
        server_app(folder, int(rounds), name),
        client_app(folder),
        num_supernodes=work.load_work(folder).clients,
        backend_config={"client_resources": {"num_cpus": int(cpus[0]), "num_gpus": 0.0}} if cpus else None,
    )
