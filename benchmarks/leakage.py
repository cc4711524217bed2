"""What a server can read from FedEPC's sparsity vectors, and what noise on them takes from it and from the clusters.

Fifty clients run `fedepc`'s own first program. The server knows the model it sent and holds 200 public rows of each
class. It reads a client's label distribution in two ways: `mixture`, by non-negative least squares from the received
model's vector, which is a mixture of the classes' own; and by a ridge regression on 80 shadow clients, made of the
public rows with the same skew, who run the same program with the same noise: from the vector of the `received` model,
of the `adapted` one, or from `all`. Two figures each: R² over all clients and classes (equal shares for all have 0),
and how often the most frequent class is found. `members`: how well the server, who is told the true label distribution,
tells a client's training rows from its test rows by the received model's vector (area under the curve, 0.5 by chance).

Beside it the groups that are found with that noise: by the `adapted` vectors, by the same `unguarded`
(`cluster.guard=0`), and by those of the `received` model alone (`represent.epochs=0`). Three figures each: the adjusted
Rand index with five planted groups, how many are found, and how many where clients do not differ. Noise is drawn five
times; figures are means. Writes `results/leakage.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import shoal
from shoal.client.sparsity import Sparsity
from shoal.data.federation import Federation
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.rng import derive_seed
from shoal.stages.cluster import Adaptive
from shoal.types import ClientData, ClientId, Examples, Params, Plan, Task

CLASSES, GROUPS = 10, 5
ADAPTED, RECEIVED = 0, 1
SEEN = {"received": [RECEIVED], "adapted": [ADAPTED], "all": [ADAPTED, RECEIVED, 2, 3]}

Floats = NDArray[np.float64]
Clients = Mapping[ClientId, ClientData]


@dataclass(frozen=True)
class Sizes:
    model: str
    clients: int
    samples: int | None  # of the data set; None: all
    public: int  # of each class
    shadows: int
    draws: int
    noises: tuple[float, ...]
    skews: tuple[float, ...]


FULL = Sizes("cnn-cifar", 50, 20_000, 200, 80, 5, (0.0, 0.01, 0.05, 0.2), (0.1, 1.0))
TINY = Sizes("mlp", 10, None, 10, 8, 1, (0.0, 0.05), (1.0,))


def told(program: Sparsity, first: Params, data: Clients, seed: int) -> dict[ClientId, torch.Tensor]:
    tasks = {c: Task({"first": first}, {}, derive_seed(seed, c)) for c in data}
    reports = PlainFleet(data).execute(Plan(program, tasks))
    return {c: r.tensors["sparsity"]["s"] for c, r in reports.items()}


@dataclass(frozen=True)
class Asked:
    """Clients, and what they told without noise."""

    program: Sparsity
    data: Clients
    exact: Mapping[ClientId, torch.Tensor]

    @cached_property
    def labels(self) -> Floats:
        counts = np.stack([np.bincount(self.data[c]["train"].y.numpy(), minlength=CLASSES) for c in self.data])
        found: Floats = counts / counts.sum(axis=1, keepdims=True)
        return found

    def without_adaptation(self) -> Asked:
        """What they would have told with `represent.epochs=0`: of the received model it is the same."""
        return replace(self, program=replace(self.program, adaptation=replace(self.program.adaptation, epochs=0)))

    def left(self, noise: float, seed: int) -> Floats:
        """[clients, 4, channels] with noise, which is the last thing that happens to them on the client."""
        program = replace(self.program, noise=noise)
        rows = {c: len(self.data[c]["train"].y) for c in self.data}
        each = [program.released(s[[0, 2, 3]], rows[c], derive_seed(seed, noise, c)) for c, s in self.exact.items()]
        found: Floats = torch.stack(each).double().numpy()
        return found


class Server:
    """The model it sent, and what that gives on public rows."""

    def __init__(self, program: Sparsity, first: Params, public: Examples) -> None:
        self.program, self.first, self.public = program, first, public
        zeros, y = self.zeros(public.x), public.y.numpy()
        self.of_classes: Floats = np.stack([zeros[y == k].mean(axis=0) for k in range(CLASSES)])
        self.within: Floats = np.cov((zeros - self.of_classes[y]).T) + 1e-3 * np.eye(zeros.shape[1])

    def zeros(self, x: torch.Tensor) -> Floats:
        found = self.program.adaptation.model.relu_output(self.first, x, self.program.place) == 0
        return found.double().numpy()

    def asks(self, data: Clients, seed: int) -> Asked:
        return Asked(self.program, data, told(self.program, self.first, data, seed))

    def suspects(self, client: ClientData, labels: Floats) -> Suspects:
        inside, outside = (self.zeros(client[s].x) - self.of_classes[client[s].y.numpy()] for s in ("train", "test"))
        return Suspects(inside, outside, labels @ self.of_classes, self.within)


@dataclass(frozen=True)
class Suspects:
    """A client's training rows and its test rows, as they differ from their classes; and what its labels would give."""

    inside: Floats
    outside: Floats
    expected: Floats
    within: Floats

    def found(self, s: Floats, noise: float) -> float:
        """By how much a row points the way in which the client differs from what its labels would give."""
        from sklearn.metrics import roc_auc_score

        spread = self.within / len(self.inside) + noise**2 / 2 * np.eye(len(s))
        way = np.linalg.solve(spread, s - self.expected)
        truth = np.repeat([1, 0], [len(self.inside), len(self.outside)])
        return float(roc_auc_score(truth, np.concatenate([self.inside, self.outside]) @ way))


def public_rows(test: Examples, count: int, seed: int) -> Examples:
    """Of rows that no client holds, as many of each class."""
    rng = np.random.default_rng(derive_seed(seed, "public"))
    y = test.y.numpy()
    rows = np.concatenate([rng.choice(np.flatnonzero(y == k), count, replace=False) for k in range(CLASSES)])
    return Examples(test.x[rows], test.y[rows])


def shadow_clients(
    public: Examples, count: int, skew: float, sizes: list[int], seed: int
) -> dict[ClientId, ClientData]:
    rng = np.random.default_rng(derive_seed(seed, "shadows", skew))
    of_class = [np.flatnonzero(public.y.numpy() == k) for k in range(CLASSES)]
    clients: dict[ClientId, ClientData] = {}
    for i in range(count):
        counts = rng.multinomial(rng.choice(sizes), rng.dirichlet(np.full(CLASSES, skew)))
        rows = np.concatenate([rng.choice(rows, n) for rows, n in zip(of_class, counts, strict=True)])
        rng.shuffle(rows)
        clients[f"shadow{i}"] = {"train": Examples(public.x[rows], public.y[rows])}
    return clients


def read_mixture(received: Floats, of_classes: Floats) -> Floats:
    """E[s] = sum over y of p(y) E[s | y], with p >= 0."""
    from scipy.optimize import nnls

    return shares(np.stack([nnls(of_classes.T, s)[0] for s in received]))


def read_by_shadows(vectors: Floats, shadows: Floats, of_shadows: Floats) -> Floats:
    from sklearn.linear_model import RidgeCV

    return shares(RidgeCV(np.logspace(-3, 3, 13)).fit(flat(shadows), of_shadows).predict(flat(vectors)))


def flat(vectors: Floats) -> Floats:
    return vectors.reshape(len(vectors), -1)


def shares(found: Floats) -> Floats:
    positive = np.maximum(found, 1e-12)
    scaled: Floats = positive / positive.sum(axis=1, keepdims=True)
    return scaled


def agreement(read: Floats, truth: Floats) -> tuple[float, float]:
    from sklearn.metrics import r2_score

    return float(r2_score(truth.ravel(), read.ravel())), float((read.argmax(1) == truth.argmax(1)).mean())


def mean_of_draws(measure: Callable[[float, int], dict[str, Any]], sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    """For each noise the means of all figures, by name."""
    found = []
    for noise in sizes.noises:
        draws = [measure(noise, derive_seed(seed, draw)) for draw in range(sizes.draws if noise else 1)]
        found.append({"noise": noise} | {k: np.mean([d[k] for d in draws], axis=0).tolist() for k in draws[0]})
    return found


def readings(server: Server, fleet: Federation, skew: float, sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    samples = fleet.sizes("train").tolist()
    shadows = server.asks(shadow_clients(server.public, sizes.shadows, skew, samples, seed), seed)
    clients = server.asks(fleet, seed)
    suspects = [server.suspects(fleet[c], p) for c, p in zip(fleet, clients.labels, strict=True)]

    def measure(noise: float, seed: int) -> dict[str, Any]:
        s, learned = clients.left(noise, seed), shadows.left(noise, seed)
        read = {"mixture": read_mixture(s[:, RECEIVED], server.of_classes)}
        read |= {name: read_by_shadows(s[:, seen], learned[:, seen], shadows.labels) for name, seen in SEEN.items()}
        both = zip(suspects, s[:, RECEIVED], strict=True)
        areas = [suspect.found(v, noise) for suspect, v in both if len(suspect.outside)]
        return {name: agreement(p, clients.labels) for name, p in read.items()} | {"members": np.mean(areas)}

    return [{"skew": skew, **row} for row in mean_of_draws(measure, sizes, seed)]


def clusters(server: Server, planted: Federation, same: Federation, sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    from sklearn.metrics import adjusted_rand_score

    assert planted.groups
    truth = list(planted.groups.values())
    adapted = [server.asks(fleet, seed) for fleet in (planted, same)]
    ways = {
        "adapted": (Adaptive(), adapted),
        "unguarded": (Adaptive(guard=0.0), adapted),
        "received": (Adaptive(), [fleet.without_adaptation() for fleet in adapted]),
    }

    def measure(noise: float, seed: int) -> dict[str, Any]:
        found = {}
        for name, (rule, fleets) in ways.items():
            apart, together = (rule(flat(fleet.left(noise, seed)), 0) for fleet in fleets)
            found[name] = (adjusted_rand_score(truth, apart), apart.max() + 1, together.max() + 1)
        return found

    return mean_of_draws(measure, sizes, seed)


def measured(data: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    source = shoal.load(data, rows=sizes.samples)
    model = load_model(sizes.model, source.input_shape, CLASSES)
    program = build("fedepc", Setting(model, rounds=1, cohort=1, lr=0.05)).programs["represent"]
    assert isinstance(program, Sparsity)
    server = Server(program, model.init(derive_seed(seed, "init")), public_rows(source.test, sizes.public, seed))

    def dealt(partition: str) -> Federation:
        return shoal.partition(source, partition, clients=sizes.clients, seed=seed)

    read = [row for skew in sizes.skews for row in readings(server, dealt(f"dirichlet:{skew}"), skew, sizes, seed)]
    same = dealt("iid")
    groups = clusters(server, dealt(f"groups:{GROUPS},100"), same, sizes, seed)
    proved = [replace(program, noise=n).privacy_guarantee(same.sizes("train").tolist()) for n in sizes.noises if n]
    return {"data": data, "seed": seed, "readings": read, "clusters": groups, "guarantees": proved}


def said(found: list[dict[str, Any]]) -> list[str]:
    ways = ("mixture", *SEEN)
    lines = [f"| data | skew | noise | {' | '.join(ways)} | members |", "|" + "---|" * 8]
    for f in found:
        for r in f["readings"]:
            pairs = " | ".join(f"{r[way][0]:.2f}, {r[way][1]:.2f}" for way in ways)
            lines.append(f"| {f['data']} | {r['skew']} | {r['noise']} | {pairs} | {r['members']:.2f} |")
    lines += ["", "| data | noise | adapted | unguarded | received |", "|" + "---|" * 5]
    for f in found:
        for r in f["clusters"]:
            cells = ("{:.2f}, {:.1f}, {:.1f}".format(*r[way]) for way in ("adapted", "unguarded", "received"))
            lines.append(f"| {f['data']} | {r['noise']} | {' | '.join(cells)} |")
    lines += ["", "| noise | rows | ε of a row | without adaptation | ε of a client |", "|" + "---|" * 5]
    for g in found[0]["guarantees"]:
        keys = ("record_epsilon", "record_epsilon_without_adaptation", "local_epsilon")
        lines.append(f"| {g['sigma']} | {g['smallest_client']} | {' | '.join(f'{g[k]:,.1f}' for k in keys)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["fashion-mnist", "mnist"], help="Names of data sets.")
    parser.add_argument("--seed", type=int, default=0, help="Default: 0.")
    options, run = harness.begin(parser, "leakage.json", {"data": ["digits"]})
    sizes = TINY if options.tiny else FULL
    torch.set_num_threads(1)
    with threadpool_limits(1):
        found = [measured(data, sizes, options.seed) for data in options.data]
    run.write(sizes=asdict(sizes), rows=found)
    print("\n".join(said(found)))


if __name__ == "__main__":
    harness.call(main)
