"""Measures the cost of clustering sparsity vectors, and what the approximations lose: AIDC on one thread.

- The vector of a client is the mean of 64 activations over 100 to 500 samples of ten classes. An activation is 0 or 1
  with a probability that depends on the class.
- The fleets have five planted groups of two classes each, label distributions from Dirichlet(0.1) or (10), or clients
  that differ only at random.
- Each fit runs in its own process, with a `predict` and an `update` after it, so that the largest resident memory is
  that of the fit. A fit that fails is a row with the reason.
- `agree` is the adjusted Rand index between a fit with references and one with the full matrix, and `truth` is that
  between clusters and planted groups.
- The guard is off when seconds are measured. Its ratio, and how many small fleets become one cluster by it, is measured
  separately.
- Joules are the seconds of the thread times the power of a server.

Writes `results/density.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import harness
import numpy as np
import torch
from harness import OK
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from shoal.clusterers.density import AdaptiveDensityClusters
from shoal.clusterers.validation import Floats, Labels

CHANNELS, CLASSES, NUM_SAMPLES_RANGE, SERVER_W = 64, 10, (100, 500), 65
FLEETS = ("groups", "dirichlet-0.1", "dirichlet-0.5", "dirichlet-1", "dirichlet-10", "iid")
TIMED_FLEETS = ("groups", "dirichlet-0.1", "dirichlet-10", "iid")
NUM_LATE_JOINING, NUM_CHANGED, NUM_GUARD_CLIENTS = 1000, 100, 100


def label_distributions(fleet: str, clients: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
    planted = np.arange(clients) % 5
    if fleet == "groups":
        return np.repeat(np.eye(5), CLASSES // 5, axis=1)[planted] * 5 / CLASSES, planted
    if fleet == "iid":
        return np.full((clients, CLASSES), 1 / CLASSES), planted * 0
    return rng.dirichlet(np.full(CLASSES, float(fleet.partition("-")[2])), clients), planted * 0


def draw_sparsities(fleet: str, clients: int, seed: int) -> tuple[Floats, tuple[Floats, Floats], Labels]:
    """Returns the vectors of all samples, those of both halves of the samples, and the planted group of each client."""
    rng = np.random.default_rng(seed)
    probabilities = 1 / (1 + np.exp(-rng.normal(0.3, 1, CHANNELS) - rng.normal(size=(CLASSES, CHANNELS))))
    distributions, planted = label_distributions(fleet, clients, rng)
    num_samples = rng.integers(NUM_SAMPLES_RANGE[0] // 2, NUM_SAMPLES_RANGE[1] // 2 + 1, clients)
    halves = []
    for _ in range(2):
        counts = rng.multinomial(num_samples, distributions)
        zeros = sum(rng.binomial(counts[:, [y]], probabilities[y]) for y in range(CLASSES))
        halves.append(zeros / num_samples[:, None])
    return (halves[0] + halves[1]) / 2, (halves[0], halves[1]), planted


def measure_fit(fleet: str, clients: int, references: int | None) -> dict[str, Any]:
    vectors, _, planted = draw_sparsities(fleet, clients, 0)
    changed, _, _ = draw_sparsities(fleet, clients, 1)
    AdaptiveDensityClusters().fit(vectors[:50])  # loads libraries
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    clusterer = AdaptiveDensityClusters(n_references=references)
    row: dict[str, Any] = {"fleet": fleet, "clients": clients, "references": references}
    row["fit_s"] = _seconds(lambda: clusterer.fit(vectors))
    row["labels"] = clusterer.labels_.tolist()
    row["clusters"], row["planted"] = int(clusterer.labels_.max()) + 1, planted.tolist()
    row["splits"], row["merges"] = clusterer.n_splits_, clusterer.n_merges_
    row["predict_s"] = _seconds(lambda: clusterer.predict(changed[:NUM_LATE_JOINING]))
    row["update_s"] = _seconds(lambda: clusterer.update(changed[:NUM_CHANGED], np.arange(min(NUM_CHANGED, clients))))
    row["joules"] = SERVER_W * row["fit_s"]
    row["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row["resident_before_bytes"] = before_bytes
    return row


def _seconds(work: Any) -> float:
    start_s = time.thread_time()  # does not count other programs
    work()
    return time.thread_time() - start_s


def measure_guard(fleet: str, seeds: int) -> dict[str, Any]:
    """Returns the range of the guard's ratio in small fleets, and how many fleets become one cluster by the guard."""
    fits = []
    for seed in range(seeds):
        vectors, halves, _ = draw_sparsities(fleet, NUM_GUARD_CLIENTS, seed)
        fits.append(AdaptiveDensityClusters().fit(vectors, halves=halves))
    ratios = [f.noise_ratio_ for f in fits]
    num_one_cluster = sum(f.is_guarded_ for f in fits)
    return {
        "fleet": fleet,
        "seeds": seeds,
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "one_cluster": num_one_cluster,
    }


def run_fit(fleet: str, clients: int, references: int, timeout_s: float) -> dict[str, Any]:
    """Returns the row of a fit in a process of its own."""
    command = [sys.executable, __file__, "--in-this-process", fleet, str(clients), str(references)]
    outcome = harness.run_process(command, timeout_s)
    facts = {"fleet": fleet, "clients": clients, "references": references or None}
    return facts | outcome.row | (json.loads(outcome.output) if outcome.status == OK else {})


def with_rand_indices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows with Rand indices instead of labels. `agree` is None without a fit of the full matrix."""
    from sklearn.metrics import adjusted_rand_score

    full_labels = {
        (r["fleet"], r["clients"]): r["labels"] for r in rows if r["status"] == OK and r["references"] is None
    }
    for row in [r for r in rows if r["status"] == OK]:
        labels = full_labels.get((row["fleet"], row["clients"]))
        row["agree"] = None if labels is None else adjusted_rand_score(labels, row["labels"])
        row["truth"] = adjusted_rand_score(row["planted"], row["labels"]) if row["fleet"] == "groups" else None
    return [{k: v for k, v in row.items() if k not in ("labels", "planted")} for row in rows]


def format_tables(rows: list[dict[str, Any]], guards: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| fleet | clients | references | fit s | J at 65 W | MiB (before) | clusters | agree | truth "
        f"| predict {NUM_LATE_JOINING} s | update {NUM_CHANGED} s |",
        "|" + "---|" * 11,
    ]
    for f in rows:
        if f["status"] != OK:
            lines.append(f"| {f['fleet']} | {f['clients']:,} | {f['references'] or 'all'} | {f['reason']} " + "|" * 9)
            continue
        agree, truth = ("" if f[key] is None else f"{f[key]:.2f}" for key in ("agree", "truth"))
        lines.append(
            f"| {f['fleet']} | {f['clients']:,} | {f['references'] or 'all'} | {f['fit_s']:.1f} | {f['joules']:.0f} "
            f"| {f['resident_bytes'] / 2**20:.0f} ({f['resident_before_bytes'] / 2**20:.0f}) | {f['clusters']:,} "
            f"| {agree} | {truth} | {f['predict_s']:.2f} | {f['update_s']:.2f} |"
        )
    lines += [f"| fleet of {NUM_GUARD_CLIENTS} clients | noise ratio | one cluster by the guard |", "|" + "---|" * 3]
    for g in guards:
        ratios = f"{g['least_ratio']:.2f} to {g['largest_ratio']:.2f}"
        lines.append(f"| {g['fleet']} | {ratios} | {g['one_cluster']} of {g['seeds']} |")
    return lines


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--in-this-process"]:
        fleet, clients, references = sys.argv[2:]
        with threadpool_limits(1):
            print(json.dumps(measure_fit(fleet, int(clients), int(references) or None)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, harness.parse_positive
    add("--clients", nargs="+", type=positive, default=[1000, 10_000], help="Numbers of clients. Default: 1000 10000.")
    add(
        "--references",
        nargs="+",
        type=positive,
        default=[200, 1000],
        help="Numbers of references, in addition to all. Default: 200 1000.",
    )
    add(
        "--fleets",
        nargs="+",
        choices=TIMED_FLEETS,
        default=list(TIMED_FLEETS),
        help="Fleets that are timed. Default: all.",
    )
    add("--guard-fleets", nargs="+", choices=FLEETS, default=list(FLEETS), help="Fleets for the guard. Default: all.")
    add("--seeds", type=positive, default=5, help="Number of small fleets of each kind. Default: 5.")
    add("--timeout-s", type=harness.parse_seconds, default=7200, help="Seconds after which a fit ends. Default: 7200.")
    tiny = {"clients": [30], "references": [20], "fleets": ["groups"], "guard_fleets": ["groups", "iid"], "seeds": 1}
    options, run = harness.begin(parser, "density.json", tiny)
    with threadpool_limits(1):
        guards = [measure_guard(fleet, options.seeds) for fleet in options.guard_fleets]
    rows = []
    for clients in options.clients:
        for fleet in options.fleets:
            for references in [0, *(q for q in options.references if q < clients)]:
                rows.append(run_fit(fleet, clients, references, options.timeout_s))
    rows = with_rand_indices(rows)
    run.write(server_w=SERVER_W, rows=rows, guards=guards)
    print("\n".join(format_tables(rows, guards)))
    return int(any(row["status"] != OK for row in rows))


if __name__ == "__main__":
    harness.call(main)
