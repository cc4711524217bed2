"""The work that all are measured on: the same network, data, first weights, batches and steps for everyone.

`prepare` writes it to a folder once; whoever is measured reads it from there and needs nothing else of shoal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, ROWS, BATCH, LR, MOMENTUM, SEED = 10, 448, 64, 0.01, 0.5, 0


@dataclass(frozen=True)
class Work:
    name: str
    model: str
    shape: tuple[int, ...]
    epochs: int


WORKS = {
    "mlp": Work("mlp", "mlp", (1, 28, 28), 10),
    "cnn": Work("cnn", "cnn-cifar", (3, 32, 32), 2),
}


def network(work: Work) -> nn.Module:
    """The network as its paper's reader would write it; shoal's own form of the CNN gives the same numbers sooner."""
    from shoal.models.cnn import CnnCifar
    from shoal.models.model import NETWORKS

    class AsWritten(CnnCifar):
        def forward(self, x: Tensor) -> Tensor:
            for conv in (self.conv1, self.conv2, self.conv3):
                x = F.max_pool2d(F.relu(conv(x)), 2)
            return self.head(F.relu(self.fc(x.flatten(1))))

    return (AsWritten if work.model == "cnn-cifar" else NETWORKS[work.model])(work.shape, 10)


def prepare(work: Work, folder: Path, rounds: int) -> None:
    """Data, first weights, and the order of rows that shoal's seeds give: [rounds, clients, steps, batch]."""
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(CLIENTS, ROWS, *work.shape, generator=g)
    y = torch.randint(0, 10, (CLIENTS, ROWS), generator=g)
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    bench = arranged(work, folder)
    first = {k: v.numpy() for k, v in bench.method.init(SEED).models["global"].items()}
    np.savez(folder / "first.npz", **first)
    np.save(folder / "order.npy", np.stack([order(bench, r) for r in range(rounds)]))


def order(bench: Any, round: int) -> Any:
    from shoal.fleet.batches import phase_seed, row_order
    from shoal.rng import derive_seed

    stage = next(s for s in bench.method.stages if s.name == "train")
    state = replace(bench.method.init(SEED), round=round, cohort=tuple(bench.federation))
    plan = stage.plan(state, derive_seed(SEED, round, stage.name))
    phase = plan.program.phases[0]
    rows = [row_order(ROWS, phase, phase_seed(plan.tasks[c].seed, 0)) for c in bench.federation]
    return torch.stack(rows).numpy()


def arranged(work: Work, folder: Path) -> Any:
    from shoal.experiment.assemble import arrange
    from shoal.experiment.job import Job

    return arrange(Job(**keys(work)), "fedavg", federation(folder))


def keys(work: Work) -> dict[str, Any]:
    """The work as the keys of a job of shoal's."""
    training = {"epochs": work.epochs, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM}
    return {"model": work.model, "cohort": 1.0, "seed": SEED} | training


def federation(folder: Path) -> Any:
    from shoal.data import Federation
    from shoal.types import Examples

    x, y = data(folder)
    clients = {f"c{i}": {"train": Examples(x[i], y[i])} for i in range(CLIENTS)}
    return Federation.from_clients(clients, Examples(x[0][:1], y[0][:1]), tuple("0123456789"))


def load(folder: Path) -> Work:
    found = json.loads((folder / "work.json").read_text())
    return Work(found["name"], found["model"], tuple(found["shape"]), found["epochs"])


def data(folder: Path) -> tuple[Tensor, Tensor]:
    found = np.load(folder / "data.npz")
    return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])


def first(folder: Path) -> dict[str, Tensor]:
    found = np.load(folder / "first.npz")
    return {k: torch.from_numpy(found[k]) for k in found.files}


def orders(folder: Path) -> Tensor:
    return torch.from_numpy(np.load(folder / "order.npy"))


@cache
def held(folder: Path) -> tuple[Tensor, Tensor, Tensor, nn.Module]:
    """All of it, read once per worker process."""
    return *data(folder), orders(folder), network(load(folder))


def finish(folder: Path, who: str, times: list[float], weights: dict[str, Tensor]) -> None:
    """What a measured program leaves behind: when each round ended, and the last weights."""
    (folder / f"{who}.json").write_text(json.dumps({"round_ends": times}))
    np.savez(folder / f"{who}.npz", **{k: v.detach().cpu().numpy() for k, v in weights.items()})


def train_client(net: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    """The local training that a user of any of the peers would write; without a DataLoader, which would cost more."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    for rows in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
