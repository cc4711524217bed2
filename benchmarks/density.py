"""What clustering sparsity vectors costs the server, and what the shortcuts lose: AIDC on one thread.

A client's vector is the mean of 64 activations over 100 to 500 examples of ten classes; an activation is 0 or 1 with a
chance that depends on the class. Fleets: five planted groups of two classes each, Dirichlet(0.1) and (10) label laws,
and none but chance between clients. Each fit, with a `predict` and an `update` after it, runs in a process of its own,
whose largest resident memory is its own; a fit that fails is a row with the reason. `agree` is the adjusted Rand index
between references and the full matrix, `truth` between clusters and planted groups. The guard is off for seconds; its
ratio, and how many small fleets it makes one cluster, is measured apart. Joules are the thread's own seconds times the
power of a server. Writes `results/density.json`.
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
    """Vectors of all examples, of both halves of them, and the planted group of each client."""
    rng = np.random.default_rng(seed)
    chances = 1 / (1 + np.exp(-rng.normal(0.3, 1, CHANNELS) - rng.normal(size=(CLASSES, CHANNELS))))
    laws, planted = label_distributions(fleet, clients, rng)
    examples = rng.integers(NUM_SAMPLES_RANGE[0] // 2, NUM_SAMPLES_RANGE[1] // 2 + 1, clients)
    halves = []
    for _ in range(2):
        counts = rng.multinomial(examples, laws)
        zeros = sum(rng.binomial(counts[:, [y]], chances[y]) for y in range(CLASSES))
        halves.append(zeros / examples[:, None])
    return (halves[0] + halves[1]) / 2, (halves[0], halves[1]), planted


def measure_fit(fleet: str, clients: int, references: int | None) -> dict[str, Any]:
    rows, _, planted = draw_sparsities(fleet, clients, 0)
    changed, _, _ = draw_sparsities(fleet, clients, 1)
    AdaptiveDensityClusters().fit(rows[:50])  # libraries are loaded
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    clusterer = AdaptiveDensityClusters(n_references=references)
    found: dict[str, Any] = {"fleet": fleet, "clients": clients, "references": references}
    found["fit_s"] = _seconds(lambda: clusterer.fit(rows))
    found["labels"] = clusterer.labels_.tolist()
    found["clusters"], found["planted"] = int(clusterer.labels_.max()) + 1, planted.tolist()
    found["splits"], found["merges"] = clusterer.n_splits_, clusterer.n_merges_
    found["predict_s"] = _seconds(lambda: clusterer.predict(changed[:NUM_LATE_JOINING]))
    found["update_s"] = _seconds(lambda: clusterer.update(changed[:NUM_CHANGED], np.arange(min(NUM_CHANGED, clients))))
    found["joules"] = SERVER_W * found["fit_s"]
    found["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["resident_before_bytes"] = before_bytes
    return found


def _seconds(work: Any) -> float:
    begun = time.thread_time()  # others on the machine are not billed
    work()
    return time.thread_time() - begun


def measure_guard(fleet: str, seeds: int) -> dict[str, Any]:
    """Of small fleets: the ratio that the guard looks at, and how many become one cluster by it."""
    fits = []
    for seed in range(seeds):
        rows, halves, _ = draw_sparsities(fleet, NUM_GUARD_CLIENTS, seed)
        fits.append(AdaptiveDensityClusters().fit(rows, halves=halves))
    ratios = [f.noise_ratio_ for f in fits]
    one = sum(f.is_guarded_ for f in fits)
    return {
        "fleet": fleet,
        "seeds": seeds,
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "one_cluster": one,
    }


def run_fit(fleet: str, clients: int, references: int, timeout_s: float) -> dict[str, Any]:
    """Returns the row of a fit in a process of its own."""
    command = [sys.executable, __file__, "--in-this-process", fleet, str(clients), str(references)]
    outcome = harness.run_process(command, timeout_s)
    asked = {"fleet": fleet, "clients": clients, "references": references or None}
    return asked | outcome.row | (json.loads(outcome.output) if outcome.status == OK else {})


def with_rand_indices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows with Rand indices instead of labels. Without the full matrix there is nothing to agree with."""
    from sklearn.metrics import adjusted_rand_score

    full = {(r["fleet"], r["clients"]): r["labels"] for r in rows if r["status"] == OK and r["references"] is None}
    for row in [r for r in rows if r["status"] == OK]:
        whole = full.get((row["fleet"], row["clients"]))
        row["agree"] = None if whole is None else adjusted_rand_score(whole, row["labels"])
        row["truth"] = adjusted_rand_score(row["planted"], row["labels"]) if row["fleet"] == "groups" else None
    return [{k: v for k, v in row.items() if k not in ("labels", "planted")} for row in rows]


def format_tables(found: list[dict[str, Any]], guards: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| fleet | clients | references | fit s | J at 65 W | MiB (before) | clusters | agree | truth "
        f"| predict {NUM_LATE_JOINING} s | update {NUM_CHANGED} s |",
        "|" + "---|" * 11,
    ]
    for f in found:
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
    add, positive = parser.add_argument, harness.require_positive
    add("--clients", nargs="+", type=positive, default=[1000, 10_000], help="Numbers of clients.")
    add("--references", nargs="+", type=positive, default=[200, 1000], help="Numbers of references, beside all.")
    add(
        "--fleets",
        nargs="+",
        choices=TIMED_FLEETS,
        default=list(TIMED_FLEETS),
        help="Fleets that are timed. Default: all.",
    )
    add("--guarded", nargs="+", choices=FLEETS, default=list(FLEETS), help="Fleets for the guard. Default: all.")
    add("--seeds", type=positive, default=5, help="Small fleets for the guard, of each kind. Default: 5.")
    add("--timeout-s", type=harness.seconds, default=7200, help="Seconds after which a fit is ended. Default: 7200.")
    tiny = {"clients": [30], "references": [20], "fleets": ["groups"], "guarded": ["groups", "iid"], "seeds": 1}
    options, run = harness.begin(parser, "density.json", tiny)
    with threadpool_limits(1):
        guards = [measure_guard(fleet, options.seeds) for fleet in options.guarded]
    found = []
    for clients in options.clients:
        for fleet in options.fleets:
            for references in [0, *(q for q in options.references if q < clients)]:
                found.append(run_fit(fleet, clients, references, options.timeout_s))
    found = with_rand_indices(found)
    run.write(server_w=SERVER_W, rows=found, guards=guards)
    print("\n".join(format_tables(found, guards)))
    return int(any(row["status"] != OK for row in found))


if __name__ == "__main__":
    harness.call(main)
