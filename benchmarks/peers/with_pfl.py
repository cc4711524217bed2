"""The work in Apple's pfl: its simulator in one process, or in one per core when started by torchrun."""

import sys
import time
from pathlib import Path

import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

state = {"round": 0}


class OrderedSamples(PyTorchTensorDataset):
    """A client's samples in the order that all peers use."""

    def with_batches(self, batches):
        self.batches, self.next_step = batches, 0
        return self

    def iter(self, batch_size):
        x, y = self.raw_data
        if batch_size == len(y):  # an evaluation
            yield x, y
            return
        steps = -(-len(y) // batch_size)
        for batch in self.batches[self.next_step : self.next_step + steps]:
            yield x[batch], y[batch]
        self.next_step += steps


class RoundEndTimes(TrainingProcessCallback):
    def __init__(self):
        self.times = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        state["round"] = central_iteration + 1
        self.times.append(time.time())
        return False, Metrics()


def with_loss(net):
    net.loss = lambda x, y, **_: torch.nn.functional.cross_entropy(net.train()(x), y)
    net.metrics = lambda x, y, **_: {"rows": Weighted(0.0, len(y))}  # called in the first round only
    return net


def main(folder: Path, rounds: int, name: str) -> None:
    x, y = work.load_samples(folder)
    order, spec = work.load_orders(folder), work.load_work(folder)
    net = with_loss(work.make_network(spec))
    net.load_state_dict(work.load_first_weights(folder))

    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=work.MOMENTUM)

    model = PyTorchModel(net, sgd, torch.optim.SGD(net.parameters(), lr=1.0))
    users = list(range(spec.clients))

    def make(user):
        return OrderedSamples((x[user], y[user]), user_id=str(user)).with_batches(order[state["round"], user])

    data = FederatedDataset(make, get_user_sampler("minimize_reuse", users))
    ends = RoundEndTimes()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=spec.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=spec.epochs, local_learning_rate=work.LR, local_batch_size=spec.batch_size),
        callbacks=[ends],
    )
    if get_framework_module().distributed.global_rank == 0:
        work.write_result(folder, name, ends.times, net.state_dict())
    if (
        torch.distributed.is_initialized()
    ):  # without this, more processes are aborted at their exit, and a few still are
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
