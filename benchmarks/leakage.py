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
from shoal.client.sparsity import MeasureSparsity
from shoal.data.federation import Federation
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.rng import derive_seed
from shoal.stages.cluster import SparsityClusters
from shoal.types import ClientData, ClientId, Params, Plan, Samples, Task

CLASSES, NUM_PLANTED_GROUPS = 10, 5
ADAPTED, RECEIVED = 0, 1
VECTORS_BY_ATTACK = {"received": [RECEIVED], "adapted": [ADAPTED], "all": [ADAPTED, RECEIVED, 2, 3]}

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


def collect_sparsity(
    program: MeasureSparsity, sent_model: Params, data: Clients, seed: int
) -> dict[ClientId, torch.Tensor]:
    tasks = {c: Task({"first": sent_model}, {}, derive_seed(seed, c)) for c in data}
    reports = PlainFleet(data).execute(Plan(program, tasks))
    return {c: r.tensors["sparsity"]["s"] for c, r in reports.items()}


@dataclass(frozen=True)
class QueriedClients:
    """Clients, and what they told without noise."""

    program: MeasureSparsity
    data: Clients
    noiseless_vectors: Mapping[ClientId, torch.Tensor]

    @cached_property
    def label_distributions(self) -> Floats:
        counts = np.stack([np.bincount(self.data[c]["train"].y.numpy(), minlength=CLASSES) for c in self.data])
        found: Floats = counts / counts.sum(axis=1, keepdims=True)
        return found

    def without_adaptation(self) -> QueriedClients:
        """What they would have told with `represent.epochs=0`: of the received model it is the same."""
        return replace(self, program=replace(self.program, adaptation=replace(self.program.adaptation, epochs=0)))

    def released_vectors(self, noise: float, seed: int) -> Floats:
        """[clients, 4, channels] with noise, which is the last thing that happens to them on the client."""
        program = replace(self.program, noise_std=noise)
        rows = {c: len(self.data[c]["train"].y) for c in self.data}
        each = [
            program.release_vectors(s[[0, 2, 3]], rows[c], derive_seed(seed, noise, c))
            for c, s in self.noiseless_vectors.items()
        ]
        found: Floats = torch.stack(each).double().numpy()
        return found


class Server:
    """The model it sent, and what that gives on public rows."""

    def __init__(self, program: MeasureSparsity, sent_model: Params, public_samples: Samples) -> None:
        self.program, self.sent_model, self.public_samples = program, sent_model, public_samples
        zeros, y = self.zero_activations(public_samples.x), public_samples.y.numpy()
        self.class_means: Floats = np.stack([zeros[y == k].mean(axis=0) for k in range(CLASSES)])
        self.class_covariance: Floats = np.cov((zeros - self.class_means[y]).T) + 1e-3 * np.eye(zeros.shape[1])

    def zero_activations(self, x: torch.Tensor) -> Floats:
        found = self.program.adaptation.model.relu_output(self.sent_model, x, self.program.layer_index) == 0
        return found.double().numpy()

    def query(self, data: Clients, seed: int) -> QueriedClients:
        return QueriedClients(self.program, data, collect_sparsity(self.program, self.sent_model, data, seed))

    def membership_attack(self, client: ClientData, labels: Floats) -> MembershipAttack:
        inside, outside = (
            self.zero_activations(client[s].x) - self.class_means[client[s].y.numpy()] for s in ("train", "test")
        )
        return MembershipAttack(inside, outside, labels @ self.class_means, self.class_covariance)


@dataclass(frozen=True)
class MembershipAttack:
    """A client's training rows and its test rows, as they differ from their classes; and what its labels would give."""

    train_deviations: Floats
    test_deviations: Floats
    expected: Floats
    class_covariance: Floats

    def auc(self, s: Floats, noise: float) -> float:
        """By how much a row points the way in which the client differs from what its labels would give."""
        from sklearn.metrics import roc_auc_score

        spread = self.class_covariance / len(self.train_deviations) + noise**2 / 2 * np.eye(len(s))
        way = np.linalg.solve(spread, s - self.expected)
        truth = np.repeat([1, 0], [len(self.train_deviations), len(self.test_deviations)])
        return float(roc_auc_score(truth, np.concatenate([self.train_deviations, self.test_deviations]) @ way))


def choose_public_samples(test: Samples, count: int, seed: int) -> Samples:
    """Of rows that no client holds, as many of each class."""
    rng = np.random.default_rng(derive_seed(seed, "public"))
    y = test.y.numpy()
    rows = np.concatenate([rng.choice(np.flatnonzero(y == k), count, replace=False) for k in range(CLASSES)])
    return Samples(test.x[rows], test.y[rows])


def shadow_clients(public: Samples, count: int, skew: float, sizes: list[int], seed: int) -> dict[ClientId, ClientData]:
    rng = np.random.default_rng(derive_seed(seed, "shadows", skew))
    of_class = [np.flatnonzero(public.y.numpy() == k) for k in range(CLASSES)]
    clients: dict[ClientId, ClientData] = {}
    for i in range(count):
        counts = rng.multinomial(rng.choice(sizes), rng.dirichlet(np.full(CLASSES, skew)))
        rows = np.concatenate([rng.choice(rows, n) for rows, n in zip(of_class, counts, strict=True)])
        rng.shuffle(rows)
        clients[f"shadow{i}"] = {"train": Samples(public.x[rows], public.y[rows])}
    return clients


def read_mixture(received: Floats, class_means: Floats) -> Floats:
    """E[s] = sum over y of p(y) E[s | y], with p >= 0."""
    from scipy.optimize import nnls

    return to_distributions(np.stack([nnls(class_means.T, s)[0] for s in received]))


def read_by_shadows(vectors: Floats, shadows: Floats, shadow_distributions: Floats) -> Floats:
    from sklearn.linear_model import RidgeCV

    return to_distributions(
        RidgeCV(np.logspace(-3, 3, 13)).fit(flat(shadows), shadow_distributions).predict(flat(vectors))
    )


def flat(vectors: Floats) -> Floats:
    return vectors.reshape(len(vectors), -1)


def to_distributions(found: Floats) -> Floats:
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


def measure_readings(
    server: Server, federation: Federation, skew: float, sizes: Sizes, seed: int
) -> list[dict[str, Any]]:
    samples = federation.samples_per_client("train").tolist()
    shadows = server.query(shadow_clients(server.public_samples, sizes.shadows, skew, samples, seed), seed)
    clients = server.query(federation, seed)
    suspects = [
        server.membership_attack(federation[c], p) for c, p in zip(federation, clients.label_distributions, strict=True)
    ]

    def measure(noise: float, seed: int) -> dict[str, Any]:
        s, learned = clients.released_vectors(noise, seed), shadows.released_vectors(noise, seed)
        read = {"mixture": read_mixture(s[:, RECEIVED], server.class_means)}
        read |= {
            name: read_by_shadows(s[:, seen], learned[:, seen], shadows.label_distributions)
            for name, seen in VECTORS_BY_ATTACK.items()
        }
        both = zip(suspects, s[:, RECEIVED], strict=True)
        areas = [suspect.auc(v, noise) for suspect, v in both if len(suspect.test_deviations)]
        return {name: agreement(p, clients.label_distributions) for name, p in read.items()} | {
            "members": np.mean(areas)
        }

    return [{"skew": skew, **row} for row in mean_of_draws(measure, sizes, seed)]


def measure_clusters(
    server: Server, planted: Federation, unclustered: Federation, sizes: Sizes, seed: int
) -> list[dict[str, Any]]:
    from sklearn.metrics import adjusted_rand_score

    assert planted.planted_groups
    truth = list(planted.planted_groups.values())
    adapted = [server.query(fleet, seed) for fleet in (planted, unclustered)]
    ways = {
        "adapted": (SparsityClusters(), adapted),
        "unguarded": (SparsityClusters(noise_guard_ratio=0.0), adapted),
        "received": (SparsityClusters(), [fleet.without_adaptation() for fleet in adapted]),
    }

    def measure(noise: float, seed: int) -> dict[str, Any]:
        found = {}
        for name, (rule, fleets) in ways.items():
            apart, together = (rule(flat(fleet.released_vectors(noise, seed)), 0) for fleet in fleets)
            found[name] = (adjusted_rand_score(truth, apart), apart.max() + 1, together.max() + 1)
        return found

    return mean_of_draws(measure, sizes, seed)


def measure_dataset(data: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    source = shoal.load(data, max_train_samples=sizes.samples)
    model = load_model(sizes.model, source.input_shape, CLASSES)
    program = build("fedepc", Setting(model, rounds=1, cohort_size=1, lr=0.05)).programs["represent"]
    assert isinstance(program, MeasureSparsity)
    server = Server(
        program, model.init(derive_seed(seed, "init")), choose_public_samples(source.test, sizes.public, seed)
    )

    def dealt(partition: str) -> Federation:
        return shoal.partition(source, partition, clients=sizes.clients, seed=seed)

    read = [
        row for skew in sizes.skews for row in measure_readings(server, dealt(f"dirichlet:{skew}"), skew, sizes, seed)
    ]
    same = dealt("iid")
    groups = measure_clusters(server, dealt(f"groups:{NUM_PLANTED_GROUPS},100"), same, sizes, seed)
    proved = [
        replace(program, noise_std=n).privacy_guarantee(same.samples_per_client("train").tolist())
        for n in sizes.noises
        if n
    ]
    return {"data": data, "seed": seed, "readings": read, "clusters": groups, "guarantees": proved}


def format_tables(found: list[dict[str, Any]]) -> list[str]:
    ways = ("mixture", *VECTORS_BY_ATTACK)
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
        found = [measure_dataset(data, sizes, options.seed) for data in options.data]
    run.write(sizes=asdict(sizes), rows=found)
    print("\n".join(format_tables(found)))


if __name__ == "__main__":
    harness.call(main)
