"""What clustering label distributions costs the server, and what it gains: SimClust and RepClust on one thread.

Clients in five partitions of two classes, (1, 5)-Dir with 490 rows a client in the mean; SimClust with as many clusters
as partitions, RepClust with groups of five. The objectives are those of Eq. (3), beside groups of the same sizes drawn
at random. Joules are the thread's own seconds times the power of a server. Writes `results/clusters.json`.
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

PARTITIONS, CLASSES, MEAN_SAMPLES, SERVER_W, RANDOM_GROUPINGS = 5, 10, 490, 65, 10

CLUSTERERS: dict[str, Callable[[int], Any]] = {
    "SimClust": lambda clients: SimilarClusters(PARTITIONS),
    "RepClust": lambda clients: RepulsiveClusters(clients // PARTITIONS),
}


def label_distributions(clients: int, seed: int = 0) -> Floats:
    """Classes and clients are cut into blocks; each class is shared out in its block by one Dirichlet(1)."""
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
    rows = label_distributions(clients)
    clusterer = CLUSTERERS[name](clients)
    begun = time.thread_time()  # others on the machine are not billed
    clusterer.fit(rows)
    seconds = time.thread_time() - begun
    rng = np.random.default_rng(0)
    random = [objectives(rows, rng.permutation(clusterer.labels_)) for _ in range(RANDOM_GROUPINGS)]
    within, between = objectives(rows, clusterer.labels_)
    return {
        "clusterer": name,
        "clients": clients,
        "groups": int(clusterer.labels_.max()) + 1,
        "seconds": seconds,
        "joules": SERVER_W * seconds,
        "within": within,
        "between": between,
        "random_within": statistics.mean(w for w, _ in random),
        "random_between": statistics.mean(b for _, b in random),
    }


def format_table(found: list[dict[str, Any]]) -> list[str]:
    lines = ["| clusterer | clients | groups | s | J at 65 W | within (random) | between (random) |", "|" + "---|" * 7]
    for f in found:
        lines.append(
            f"| {f['clusterer']} | {f['clients']:,} | {f['groups']:,} | {f['seconds']:.3f} | {f['joules']:.2f} "
            f"| {f['within']:.2f} ({f['random_within']:.2f}) | {f['between']:.4f} ({f['random_between']:.4f}) |"
        )
    for name in CLUSTERERS:
        for a, b in pairwise(f for f in found if f["clusterer"] == name):
            power = math.log(b["seconds"] / a["seconds"]) / math.log(b["clients"] / a["clients"])
            lines.append(f"{name}, {a['clients']:,} to {b['clients']:,} clients: seconds grow with power {power:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = [100, 1000, 10_000]
    parser.add_argument(
        "--clients", nargs="+", type=harness.require_positive, default=numbers, help="Numbers of clients."
    )
    options, run = harness.begin(parser, "clusters.json", {"clients": [20, 40]})
    with threadpool_limits(1):
        for name in CLUSTERERS:
            measure(name, min(options.clients))  # libraries are loaded
        found = [measure(name, clients) for name in CLUSTERERS for clients in options.clients]
    run.write(server_w=SERVER_W, rows=found)
    print("\n".join(format_table(found)))


if __name__ == "__main__":
    harness.call(main)
