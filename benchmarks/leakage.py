"""Measures what a server can infer from FedEPC's sparsity vectors, and the effect of noise on that and on clusters.

Fifty clients run the first program of `fedepc`. The server knows the model that it sent, and has 200 public samples of
each class. It attacks the vectors in three ways:

- `mixture` infers a client's label distribution by non-negative least squares from the vector of the received model,
  which is a mixture of the vectors of the classes.
- `received`, `adapted` and `all` infer the label distribution by ridge regression on 80 shadow clients. A shadow client
  has public samples with the same skew, and runs the same program with the same noise. The names say which vectors are
  used: that of the received model, that of the adapted model, or all.
- `members` uses the true label distribution, and separates a client's training samples from its test samples by the
  vector of the received model.

The first two have two metrics: R² over all clients and classes (equal shares for all classes give 0), and how often the
most frequent class is correct. The metric of `members` is the area under the curve, which is 0.5 at random.

The clusters with the same noise use the `adapted` vectors, the same ones `unguarded` (`cluster.noise_guard_ratio=0`),
or those of the `received` model alone (`represent.epochs=0`). They have three metrics: the adjusted Rand index with
five planted groups, the number of clusters, and the number of clusters if clients do not differ. Noise is drawn five
times, and metrics are means. Writes `results/leakage.json`.
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
    """The sizes of the benchmark."""

    model: str
    clients: int
    samples: int | None  # training samples of the data set; None: all
    public: int  # samples of each class
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
    """Clients, and the vectors that they would report without noise."""

    program: MeasureSparsity
    data: Clients
    noiseless_vectors: Mapping[ClientId, torch.Tensor]

    @cached_property
    def label_distributions(self) -> Floats:
        counts = np.stack([np.bincount(self.data[c]["train"].y.numpy(), minlength=CLASSES) for c in self.data])
        distributions: Floats = counts / counts.sum(axis=1, keepdims=True)
        return distributions

    def without_adaptation(self) -> QueriedClients:
        """Returns the clients with `represent.epochs=0`, which reports the same vectors of the received model."""
        return replace(self, program=replace(self.program, adaptation=replace(self.program.adaptation, epochs=0)))

    def released_vectors(self, noise: float, seed: int) -> Floats:
        """Returns vectors with noise, [clients, 4, channels]. A client adds noise as its last step."""
        program = replace(self.program, noise_std=noise)
        num_samples = {c: len(self.data[c]["train"].y) for c in self.data}
        vectors = [
            program.release_vectors(s[[0, 2, 3]], num_samples[c], derive_seed(seed, noise, c))
            for c, s in self.noiseless_vectors.items()
        ]
        released: Floats = torch.stack(vectors).double().numpy()
        return released


class Server:
    """The server: the model that it sent, and the activations of that model on public samples."""

    def __init__(self, program: MeasureSparsity, sent_model: Params, public_samples: Samples) -> None:
        self.program, self.sent_model, self.public_samples = program, sent_model, public_samples
        zeros, y = self.zero_activations(public_samples.x), public_samples.y.numpy()
        self.class_means: Floats = np.stack([zeros[y == k].mean(axis=0) for k in range(CLASSES)])
        self.class_covariance: Floats = np.cov((zeros - self.class_means[y]).T) + 1e-3 * np.eye(zeros.shape[1])

    def zero_activations(self, x: torch.Tensor) -> Floats:
        is_zero = self.program.adaptation.model.relu_output(self.sent_model, x, self.program.layer_index) == 0
        return is_zero.double().numpy()

    def query(self, data: Clients, seed: int) -> QueriedClients:
        return QueriedClients(self.program, data, collect_sparsity(self.program, self.sent_model, data, seed))

    def membership_attack(self, client: ClientData, labels: Floats) -> MembershipAttack:
        train, test = (
            self.zero_activations(client[s].x) - self.class_means[client[s].y.numpy()] for s in ("train", "test")
        )
        return MembershipAttack(train, test, labels @ self.class_means, self.class_covariance)


@dataclass(frozen=True)
class MembershipAttack:
    """The deviations of a client's samples from their classes, and the vector that its labels alone would give."""

    train_deviations: Floats
    test_deviations: Floats
    expected: Floats
    class_covariance: Floats

    def auc(self, s: Floats, noise: float) -> float:
        """Returns the area under the curve, with each sample scored along the client's deviation from its labels."""
        from sklearn.metrics import roc_auc_score

        spread = self.class_covariance / len(self.train_deviations) + noise**2 / 2 * np.eye(len(s))
        direction = np.linalg.solve(spread, s - self.expected)
        truth = np.repeat([1, 0], [len(self.train_deviations), len(self.test_deviations)])
        return float(roc_auc_score(truth, np.concatenate([self.train_deviations, self.test_deviations]) @ direction))


def choose_public_samples(test: Samples, count: int, seed: int) -> Samples:
    """Draws as many samples of each class, of samples that no client has."""
    rng = np.random.default_rng(derive_seed(seed, "public"))
    y = test.y.numpy()
    indices = np.concatenate([rng.choice(np.flatnonzero(y == k), count, replace=False) for k in range(CLASSES)])
    return Samples(test.x[indices], test.y[indices])


def shadow_clients(public: Samples, count: int, skew: float, sizes: list[int], seed: int) -> dict[ClientId, ClientData]:
    rng = np.random.default_rng(derive_seed(seed, "shadows", skew))
    indices_of_class = [np.flatnonzero(public.y.numpy() == k) for k in range(CLASSES)]
    clients: dict[ClientId, ClientData] = {}
    for i in range(count):
        counts = rng.multinomial(rng.choice(sizes), rng.dirichlet(np.full(CLASSES, skew)))
        indices = np.concatenate([rng.choice(c, n) for c, n in zip(indices_of_class, counts, strict=True)])
        rng.shuffle(indices)
        clients[f"shadow{i}"] = {"train": Samples(public.x[indices], public.y[indices])}
    return clients


def read_mixture(received: Floats, class_means: Floats) -> Floats:
    """Returns the distributions p >= 0 that solve E[s] = sum over y of p(y) E[s | y]."""
    from scipy.optimize import nnls

    return to_distributions(np.stack([nnls(class_means.T, s)[0] for s in received]))


def read_by_shadows(vectors: Floats, shadows: Floats, shadow_distributions: Floats) -> Floats:
    from sklearn.linear_model import RidgeCV

    return to_distributions(
        RidgeCV(np.logspace(-3, 3, 13)).fit(flat(shadows), shadow_distributions).predict(flat(vectors))
    )


def flat(vectors: Floats) -> Floats:
    return vectors.reshape(len(vectors), -1)


def to_distributions(values: Floats) -> Floats:
    positive = np.maximum(values, 1e-12)
    scaled: Floats = positive / positive.sum(axis=1, keepdims=True)
    return scaled


def agreement(inferred: Floats, truth: Floats) -> tuple[float, float]:
    from sklearn.metrics import r2_score

    return float(r2_score(truth.ravel(), inferred.ravel())), float((inferred.argmax(1) == truth.argmax(1)).mean())


def mean_of_draws(measure: Callable[[float, int], dict[str, Any]], sizes: Sizes, seed: int) -> list[dict[str, Any]]:
    """Returns the means of all metrics by name, for each standard deviation of the noise."""
    rows = []
    for noise in sizes.noises:
        draws = [measure(noise, derive_seed(seed, draw)) for draw in range(sizes.draws if noise else 1)]
        rows.append({"noise": noise} | {k: np.mean([d[k] for d in draws], axis=0).tolist() for k in draws[0]})
    return rows


def measure_readings(
    server: Server, federation: Federation, skew: float, sizes: Sizes, seed: int
) -> list[dict[str, Any]]:
    num_samples = federation.samples_per_client("train").tolist()
    shadows = server.query(shadow_clients(server.public_samples, sizes.shadows, skew, num_samples, seed), seed)
    clients = server.query(federation, seed)
    attacks = [
        server.membership_attack(federation[c], p) for c, p in zip(federation, clients.label_distributions, strict=True)
    ]

    def measure(noise: float, seed: int) -> dict[str, Any]:
        vectors, shadow_vectors = clients.released_vectors(noise, seed), shadows.released_vectors(noise, seed)
        inferred = {"mixture": read_mixture(vectors[:, RECEIVED], server.class_means)}
        inferred |= {
            name: read_by_shadows(vectors[:, indices], shadow_vectors[:, indices], shadows.label_distributions)
            for name, indices in VECTORS_BY_ATTACK.items()
        }
        pairs = zip(attacks, vectors[:, RECEIVED], strict=True)
        areas = [attack.auc(v, noise) for attack, v in pairs if len(attack.test_deviations)]
        return {name: agreement(p, clients.label_distributions) for name, p in inferred.items()} | {
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
        metrics = {}
        for name, (rule, fleets) in ways.items():
            apart, together = (rule(flat(fleet.released_vectors(noise, seed)), 0) for fleet in fleets)
            metrics[name] = (adjusted_rand_score(truth, apart), apart.max() + 1, together.max() + 1)
        return metrics

    return mean_of_draws(measure, sizes, seed)


def measure_dataset(data: str, sizes: Sizes, seed: int) -> dict[str, Any]:
    source = shoal.load(data, max_train_samples=sizes.samples)
    model = load_model(sizes.model, source.input_shape, CLASSES)
    program = build("fedepc", Setting(model, rounds=1, cohort_size=1, lr=0.05)).programs["represent"]
    assert isinstance(program, MeasureSparsity)
    server = Server(
        program, model.init(derive_seed(seed, "init")), choose_public_samples(source.test, sizes.public, seed)
    )

    def divide(partition: str) -> Federation:
        return shoal.partition(source, partition, clients=sizes.clients, seed=seed)

    readings = [
        row for skew in sizes.skews for row in measure_readings(server, divide(f"dirichlet:{skew}"), skew, sizes, seed)
    ]
    same = divide("iid")
    clusters = measure_clusters(server, divide(f"groups:{NUM_PLANTED_GROUPS},100"), same, sizes, seed)
    guarantees = [
        replace(program, noise_std=n).privacy_guarantee(same.samples_per_client("train").tolist())
        for n in sizes.noises
        if n
    ]
    return {"data": data, "seed": seed, "readings": readings, "clusters": clusters, "guarantees": guarantees}


def format_tables(rows: list[dict[str, Any]]) -> list[str]:
    ways = ("mixture", *VECTORS_BY_ATTACK)
    lines = [f"| data | skew | noise | {' | '.join(ways)} | members |", "|" + "---|" * 8]
    for f in rows:
        for r in f["readings"]:
            pairs = " | ".join(f"{r[way][0]:.2f}, {r[way][1]:.2f}" for way in ways)
            lines.append(f"| {f['data']} | {r['skew']} | {r['noise']} | {pairs} | {r['members']:.2f} |")
    lines += ["", "| data | noise | adapted | unguarded | received |", "|" + "---|" * 5]
    for f in rows:
        for r in f["clusters"]:
            cells = ("{:.2f}, {:.1f}, {:.1f}".format(*r[way]) for way in ("adapted", "unguarded", "received"))
            lines.append(f"| {f['data']} | {r['noise']} | {' | '.join(cells)} |")
    lines += ["", "| noise | samples | ε of a sample | without adaptation | ε of a client |", "|" + "---|" * 5]
    for g in rows[0]["guarantees"]:
        keys = ("record_epsilon", "record_epsilon_without_adaptation", "local_epsilon")
        lines.append(f"| {g['sigma']} | {g['smallest_client']} | {' | '.join(f'{g[k]:,.1f}' for k in keys)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        nargs="+",
        default=["fashion-mnist", "mnist"],
        help="Names of data sets. Default: fashion-mnist mnist.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed. Default: 0.")
    options, run = harness.begin(parser, "leakage.json", {"data": ["digits"]})
    sizes = TINY if options.tiny else FULL
    torch.set_num_threads(1)
    with threadpool_limits(1):
        rows = [measure_dataset(data, sizes, options.seed) for data in options.data]
    run.write(sizes=asdict(sizes), rows=rows)
    print("\n".join(format_tables(rows)))


if __name__ == "__main__":
    harness.call(main)
