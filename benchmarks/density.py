"""What clustering sparsity vectors costs the server, and what the shortcuts lose: AIDC on one thread.

A client's vector is the mean of 64 activations over 100 to 500 examples of ten classes; an activation is 0 or 1 with a
chance that depends on the class. Fleets: five planted groups of two classes each, Dirichlet(0.1) and (10) label laws,
and none but chance between clients. Each fit, with a `predict` and an `update` after it, runs in a process of its own,
whose largest resident memory is its own. `agree` is the adjusted Rand index between references and the full matrix,
`truth` between clusters and planted groups. The guard is off for seconds; its ratio, and how many of `SEEDS` small
fleets it makes one cluster, is measured apart. Joules are the thread's own seconds times the power of a server. Writes
`results/density.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from shoal.clusterers.density import AdaptiveDensityClusters
from shoal.clusterers.validation import Floats, Labels

RESULTS = Path(__file__).parent / "results"
CHANNELS, CLASSES, EXAMPLES, SERVER_W = 64, 10, (100, 500), 65
FLEETS = ("groups", "dirichlet-0.1", "dirichlet-0.5", "dirichlet-1", "dirichlet-10", "iid")
TIMED = ("groups", "dirichlet-0.1", "dirichlet-10", "iid")
NEWCOMERS, CHANGED, SEEDS, SMALL = 1000, 100, 5, 100


def label_laws(fleet: str, clients: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
    planted = np.arange(clients) % 5
    if fleet == "groups":
        return np.repeat(np.eye(5), CLASSES // 5, axis=1)[planted] * 5 / CLASSES, planted
    if fleet == "iid":
        return np.full((clients, CLASSES), 1 / CLASSES), planted * 0
    return rng.dirichlet(np.full(CLASSES, float(fleet.partition("-")[2])), clients), planted * 0


def sparsities(fleet: str, clients: int, seed: int) -> tuple[Floats, tuple[Floats, Floats], Labels]:
    """Vectors of all examples, of both halves of them, and the planted group of each client."""
    rng = np.random.default_rng(seed)
    chances = 1 / (1 + np.exp(-rng.normal(0.3, 1, CHANNELS) - rng.normal(size=(CLASSES, CHANNELS))))
    laws, planted = label_laws(fleet, clients, rng)
    examples = rng.integers(EXAMPLES[0] // 2, EXAMPLES[1] // 2 + 1, clients)
    halves = []
    for _ in range(2):
        counts = rng.multinomial(examples, laws)
        zeros = sum(rng.binomial(counts[:, [y]], chances[y]) for y in range(CLASSES))
        halves.append(zeros / examples[:, None])
    return (halves[0] + halves[1]) / 2, (halves[0], halves[1]), planted


def measured(fleet: str, clients: int, references: int | None) -> dict[str, Any]:
    rows, _, planted = sparsities(fleet, clients, 0)
    changed, _, _ = sparsities(fleet, clients, 1)
    AdaptiveDensityClusters().fit(rows[:50])  # libraries are loaded
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    clusterer = AdaptiveDensityClusters(n_references=references)
    found: dict[str, Any] = {"fleet": fleet, "clients": clients, "references": references}
    found["fit_s"] = _seconds(lambda: clusterer.fit(rows))
    found["labels"] = clusterer.labels_.tolist()
    found["clusters"], found["planted"] = int(clusterer.labels_.max()) + 1, planted.tolist()
    found["splits"], found["merges"] = clusterer.splits_, clusterer.merges_
    found["predict_s"] = _seconds(lambda: clusterer.predict(changed[:NEWCOMERS]))
    found["update_s"] = _seconds(lambda: clusterer.update(changed[:CHANGED], np.arange(CHANGED)))
    found["joules"] = SERVER_W * found["fit_s"]
    found["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["resident_before_bytes"] = before_bytes
    return found


def _seconds(work: Any) -> float:
    begun = time.thread_time()  # others on the machine are not billed
    work()
    return time.thread_time() - begun


def guarded(fleet: str) -> dict[str, Any]:
    """Of small fleets: the ratio that the guard looks at, and how many become one cluster by it."""
    fits = []
    for seed in range(SEEDS):
        rows, halves, _ = sparsities(fleet, SMALL, seed)
        fits.append(AdaptiveDensityClusters().fit(rows, halves=halves))
    ratios = [f.noise_ratio_ for f in fits]
    one = sum(f.guarded_ for f in fits)
    return {"fleet": fleet, "least_ratio": min(ratios), "largest_ratio": max(ratios), "one_cluster": one}


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rand indices instead of labels."""
    from sklearn.metrics import adjusted_rand_score

    full = {(f["fleet"], f["clients"]): f["labels"] for f in found if f["references"] is None}
    for f in found:
        f["agree"] = adjusted_rand_score(full[f["fleet"], f["clients"]], f["labels"])
        f["truth"] = adjusted_rand_score(f.pop("planted"), f["labels"]) if f["fleet"] == "groups" else None
    for f in found:
        f.pop("labels")
    return found


def said(found: list[dict[str, Any]], guards: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| fleet | clients | references | fit s | J at 65 W | MiB (before) | clusters | agree | truth "
        f"| predict {NEWCOMERS} s | update {CHANGED} s |",
        "|" + "---|" * 11,
    ]
    for f in found:
        truth = "" if f["truth"] is None else f"{f['truth']:.2f}"
        lines.append(
            f"| {f['fleet']} | {f['clients']:,} | {f['references'] or 'all'} | {f['fit_s']:.1f} | {f['joules']:.0f} "
            f"| {f['resident_bytes'] / 2**20:.0f} ({f['resident_before_bytes'] / 2**20:.0f}) | {f['clusters']:,} "
            f"| {f['agree']:.2f} | {truth} | {f['predict_s']:.2f} | {f['update_s']:.2f} |"
        )
    lines += [f"| fleet of {SMALL} clients | noise ratio | one cluster by the guard |", "|" + "---|" * 3]
    for g in guards:
        lines.append(
            f"| {g['fleet']} | {g['least_ratio']:.2f} to {g['largest_ratio']:.2f} | {g['one_cluster']} of {SEEDS} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1000, 10_000])
    parser.add_argument("--references", nargs="+", type=int, default=[200, 1000])
    parser.add_argument("--fleets", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        if given.only:
            fleet, clients, references = given.only
            print(json.dumps(measured(fleet, int(clients), int(references) or None)))
            return
        guards = [guarded(fleet) for fleet in FLEETS]
    found = []
    for clients in given.clients:
        for fleet in given.fleets:
            for references in [0, *(q for q in given.references if q < clients)]:
                command = [sys.executable, __file__, "--only", fleet, str(clients), str(references)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout))
    found = compared(found)
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"server_w": SERVER_W, "measured": found, "guards": guards}, indent=1)
    (RESULTS / "density.json").write_text(text + "\n")
    print("\n".join(said(found, guards)))


if __name__ == "__main__":
    main()
