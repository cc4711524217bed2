"""The work that all peers do: the same network, samples, first weights, batches and steps.

`prepare` writes the work to a folder once. A peer reads it with the functions below, and needs nothing else of shoal.
This module is not a benchmark itself: `compare.py` and `peers/` use it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, LR, MOMENTUM, SEED = 10, 0.01, 0.5, 0


@dataclass(frozen=True)
class Work:
    """The sizes of a work."""

    name: str
    model: str
    shape: tuple[int, ...]
    epochs: int
    clients: int = 10
    num_samples: int = 448  # of each client
    batch_size: int = 64

    @property
    def num_steps(self) -> int:
        """The steps of all clients in a round."""
        return self.clients * self.epochs * (self.num_samples // self.batch_size)


WORKS = {
    "mlp": Work("mlp", "mlp", (1, 28, 28), 10),
    "cnn": Work("cnn", "cnn-cifar", (3, 32, 32), 2),
}
TINY_WORKS = {
    "mlp": replace(WORKS["mlp"], shape=(1, 4, 4), epochs=2, clients=2, num_samples=16, batch_size=8),
    "cnn": replace(WORKS["cnn"], shape=(1, 22, 22), epochs=1, clients=2, num_samples=16, batch_size=8),
}


class Mlp(nn.Module):
    """A network with two hidden layers. Its parameters have the same names as in shoal's network."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(math.prod(shape), 64), nn.Linear(64, 30), nn.Linear(30, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Cnn(nn.Module):
    """A network with three convolutions in their usual form. shoal's form gives the same numbers faster."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(shape[0], 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)
        with torch.no_grad():
            features = self.convolve(torch.zeros(1, *shape)).shape[1]
        self.fc, self.head = nn.Linear(features, 64), nn.Linear(64, CLASSES)

    def convolve(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc(self.convolve(x))))


def make_network(work: Work) -> nn.Module:
    """Returns the network with random weights. Load `load_first_weights(folder)` into it."""
    return {"mlp": Mlp, "cnn-cifar": Cnn}[work.model](work.shape)


def prepare(work: Work, folder: Path, rounds: int) -> None:
    """Writes the samples, the first weights, and the order of samples, [rounds, clients, steps, batch]."""
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(work.clients, work.num_samples, *work.shape, generator=g)
    y = torch.randint(0, CLASSES, (work.clients, work.num_samples), generator=g)
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    weights, orders = weights_and_orders(folder, rounds)
    np.savez(folder / "first.npz", **{k: v.numpy() for k, v in weights.items()})
    np.save(folder / "order.npy", orders.numpy())


def weights_and_orders(folder: Path, rounds: int) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the first weights and the orders of samples that shoal's seeds give."""
    from shoal.experiment.assemble import assemble
    from shoal.experiment.job import Job
    from shoal.fleet.batches import batch_indices, phase_seed
    from shoal.rng import derive_seed

    work = load_work(folder)
    experiment = assemble(Job(**job_keys(work)), "fedavg", load_federation(folder))
    state = replace(experiment.method.init(SEED), cohort=tuple(experiment.federation))
    stage = next(s for s in experiment.method.stages if s.name == "train")
    orders = []
    for r in range(rounds):
        plan = stage.plan(replace(state, round=r), derive_seed(SEED, r, stage.name))
        phases = plan.program.phases
        seeds = [phase_seed(plan.tasks[c].seed, phases, 0) for c in experiment.federation]
        orders.append(torch.stack([batch_indices(work.num_samples, phases[0], seed) for seed in seeds]))
    return state.models["global"], torch.stack(orders)


def job_keys(work: Work) -> dict[str, Any]:
    """Returns the work as keys of a job of shoal."""
    training = {"epochs": work.epochs, "batch_size": work.batch_size, "lr": LR, "momentum": MOMENTUM}
    return {"model": work.model, "cohort": 1.0, "seed": SEED} | training


def load_federation(folder: Path) -> Any:
    """Returns the samples as a federation of shoal."""
    from shoal import Federation
    from shoal.types import Samples

    x, y = load_samples(folder)
    clients = {f"c{i}": {"train": Samples(x[i], y[i])} for i in range(len(x))}
    return Federation.from_clients(clients, Samples(x[0][:1], y[0][:1]), tuple(map(str, range(CLASSES))))


def load_work(folder: Path) -> Work:
    """Reads the sizes of the work."""
    fields = json.loads((folder / "work.json").read_text())
    return Work(**fields | {"shape": tuple(fields["shape"])})


def load_samples(folder: Path) -> tuple[Tensor, Tensor]:
    """Reads the samples: x [clients, samples, ...] and y."""
    arrays = np.load(folder / "data.npz")
    return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])


def load_first_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the weights before the first round."""
    arrays = np.load(folder / "first.npz")
    return {k: torch.from_numpy(arrays[k]) for k in arrays.files}


def load_orders(folder: Path) -> Tensor:
    """Reads the order of samples, [rounds, clients, steps, batch]."""
    return torch.from_numpy(np.load(folder / "order.npy"))


@cache
def load_cached(folder: Path) -> tuple[Tensor, Tensor, Tensor, nn.Module]:
    """Returns the samples, the orders and the network, which a worker process reads only once."""
    return *load_samples(folder), load_orders(folder), make_network(load_work(folder))


def write_result(folder: Path, name: str, times: list[float], weights: dict[str, Tensor]) -> None:
    """Writes the result of a peer: the end of each round, and the last weights."""
    np.savez(folder / f"{name}.npz", **{k: v.detach().cpu().numpy() for k, v in weights.items()})
    (folder / f"{name}.json").write_text(json.dumps({"round_ends": times}))


def train_client(net: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    """Trains as a user of a peer would write it, but without a DataLoader, which would be slower."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    for batch in batches:
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
