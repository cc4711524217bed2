"""Measures the cost and the quality of clustering label distributions: SimClust and RepClust on one thread.

The clients are in five partitions of two classes, (1, 5)-Dir, with 490 samples per client on average. SimClust forms as
many clusters as there are partitions, and RepClust forms clusters of five clients. The objectives are those of Eq. (3),
compared with random clusters of the same sizes. Joules are the seconds of the thread times the power of a server.
Writes `results/clusters.json`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import harness
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from shoal.clusterers.repulsive import RepulsiveClusters, objectives
from shoal.clusterers.similar import SimilarClusters
from shoal.clusterers.validation import Floats

PARTITIONS, CLASSES, MEAN_SAMPLES, SERVER_W, RANDOM_CLUSTERINGS = 5, 10, 490, 65, 10

CLUSTERERS: dict[str, Callable[[int], Any]] = {
    "SimClust": lambda clients: SimilarClusters(PARTITIONS),
    "RepClust": lambda clients: RepulsiveClusters(clients // PARTITIONS),
}


def label_distributions(clients: int, seed: int = 0) -> Floats:
    """Returns the label distributions of clients in blocks. Each class is divided in its block by one Dirichlet(1)."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((clients, CLASSES))
    blocks = np.array_split(np.arange(clients), PARTITIONS)
    for inside, labels in zip(blocks, np.array_split(np.arange(CLASSES), PARTITIONS), strict=True):
        for label in labels:
            counts[inside, label] = rng.multinomial(
                clients * MEAN_SAMPLES // CLASSES, rng.dirichlet(np.ones(len(inside)))
            )
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def measure(name: str, clients: int) -> dict[str, Any]:
    distributions = label_distributions(clients)
    clusterer = CLUSTERERS[name](clients)
    start_s = time.thread_time()  # does not count other programs
    clusterer.fit(distributions)
    seconds = time.thread_time() - start_s
    rng = np.random.default_rng(0)
    random = [objectives(distributions, rng.permutation(clusterer.labels_)) for _ in range(RANDOM_CLUSTERINGS)]
    within, between = objectives(distributions, clusterer.labels_)
    return {
        "clusterer": name,
        "clients": clients,
        "clusters": int(clusterer.labels_.max()) + 1,
        "seconds": seconds,
        "joules": SERVER_W * seconds,
        "within": within,
        "between": between,
        "random_within": statistics.mean(w for w, _ in random),
        "random_between": statistics.mean(b for _, b in random),
    }


def format_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| clusterer | clients | clusters | s | J at 65 W | within (random) | between (random) |",
        "|" + "---|" * 7,
    ]
    for r in rows:
        lines.append(
            f"| {r['clusterer']} | {r['clients']:,} | {r['clusters']:,} | {r['seconds']:.3f} | {r['joules']:.2f} "
            f"| {r['within']:.2f} ({r['random_within']:.2f}) | {r['between']:.4f} ({r['random_between']:.4f}) |"
        )
    for name in CLUSTERERS:
        for a, b in pairwise(r for r in rows if r["clusterer"] == name):
            power = math.log(b["seconds"] / a["seconds"]) / math.log(b["clients"] / a["clients"])
            lines.append(f"{name}, {a['clients']:,} to {b['clients']:,} clients: seconds grow with power {power:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = [100, 1000, 10_000]
    parser.add_argument(
        "--clients",
        nargs="+",
        type=harness.parse_positive,
        default=numbers,
        help="Numbers of clients. Default: 100 1000 10000.",
    )
    options, run = harness.begin(parser, "clusters.json", {"clients": [20, 40]})
    with threadpool_limits(1):
        for name in CLUSTERERS:
            measure(name, min(options.clients))  # loads libraries
        rows = [measure(name, clients) for name in CLUSTERERS for clients in options.clients]
    run.write(server_w=SERVER_W, rows=rows)
    print("\n".join(format_table(rows)))


if __name__ == "__main__":
    harness.call(main)
