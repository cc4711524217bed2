"""What is not training, and what many clients cost: `make bench` runs it after the comparison with peers.

Every part is a real run with its folder (checkpoints, lines, private state) in a process of its own, so that
seconds and resident memory are its own. Writes `results/scale.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shoal.cost.timer import Timer
from shoal.data import Federation
from shoal.experiment.assemble import arrange
from shoal.experiment.job import Job
from shoal.experiment.run import run_experiment
from shoal.types import Examples

RESULTS = Path(__file__).parent / "results"
SHAPE = (1, 28, 28)
WARM = 2  # rounds that are not counted


def federation(clients: int, rows: int, tested: int = 1, central: int = 1) -> Federation:
    """Random rows, laid out without a step per client: as quick for 100,000 of them as for ten."""
    import numpy as np

    g = torch.Generator().manual_seed(0)
    sizes = {"train": rows, "val": 0, "test": tested}
    starts = np.cumsum([0, *(clients * n for n in sizes.values())])
    bounds = {split: starts[i] + np.arange(clients + 1) * n for i, (split, n) in enumerate(sizes.items())}

    def draw(n: int) -> Examples:
        return Examples(torch.randn(n, *SHAPE, generator=g), torch.randint(0, 10, (n,), generator=g))

    names = tuple(f"c{i:06d}" for i in range(clients))
    return Federation(draw(int(starts[-1])), bounds, names, central=draw(central), classes=tuple("0123456789"))


class Memory:
    """The most that this process and its workers held at any time; pages that they share are counted once."""

    most = 0

    def __enter__(self) -> Memory:
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(0.5):
            workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            self.most = max(self.most, sum(resident(pid) for pid in [str(os.getpid()), *workers]))


def resident(pid: str) -> int:
    try:
        facts = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # just gone
    return int(facts.partition("Pss:")[2].split()[0]) * 1024


def played(method: str, fed: Federation, **keys: Any) -> tuple[dict[str, float], list[float], int]:
    """Seconds by part and the moments at which rounds ended, both without the first rounds, in which libraries are
    loaded and steps recorded; and the largest resident memory of all processes, in bytes."""
    timer, ends, cold = Timer(), [], {}

    def on_round(record: Any) -> None:
        ends.append(time.perf_counter())
        if record.round == WARM:
            cold.update(timer.seconds)

    bench = arrange(Job(method=method, model="mlp", **keys), method, fed)
    with tempfile.TemporaryDirectory() as folder, Memory() as memory:
        run_experiment(bench, Path(folder) / "run", timer=timer, on_round=on_round)
    spent = {k: s - cold.get(k, 0) for k, s in timer.seconds.items()}
    return spent, ends[WARM - 1 :], memory.most


def overhead() -> dict[str, Any]:
    """100 clients, all in every round, two epochs of 448 rows: how much of a round is not training."""
    rounds = 6
    spent, _, _ = played(
        "fedavg", federation(100, 448), rounds=WARM + rounds, cohort=1.0, epochs=2, batch_size=64, eval_every=100
    )
    evaluated = sum(s for k, s in spent.items() if k.startswith("evaluate"))
    rest = sum(s for k, s in spent.items() if k != "train: clients") - evaluated
    return {"train_s": spent["train: clients"] / rounds, "other_s": rest / rounds, "parts_s": spent}


def evaluation(epochs: int) -> dict[str, Any]:
    """Evaluated in every round: 10 of 100 clients train, all 100 and 10,000 central rows are tested."""
    rounds = 12
    fed = federation(100, 448, tested=64, central=10_000)
    spent, _, _ = played("fedavg", fed, rounds=WARM + rounds, cohort=10, epochs=epochs, batch_size=64, eval_every=1)
    tested = {k: s / rounds for k, s in spent.items() if k.startswith("evaluate")}
    return {"train_s": spent["train: clients"] / rounds, "evaluate_s": sum(tested.values()), **tested}


def clients(count: int) -> dict[str, Any]:
    """A cohort of 100 out of `count` clients of 20 rows."""
    rounds = 12
    _, ends, memory = played(
        "fedavg", federation(count, 20), rounds=rounds, cohort=100, epochs=5, batch_size=10, eval_every=rounds
    )
    gaps = [b - a for a, b in pairwise(ends[:-1])]  # the last round is evaluated
    return {"clients": count, "per_round_s": statistics.median(gaps), "resident_bytes": memory}


def private() -> dict[str, Any]:
    """100,000 clients, each with an MLP of its own that it trains and keeps (21 GB of private state on disk)."""
    count, began = 100_000, time.perf_counter()
    _, _, memory = played("local", federation(count, 1), rounds=1, cohort=1.0, epochs=1, batch_size=8)
    return {"clients": count, "resident_bytes": memory, "whole_s": time.perf_counter() - began}


PARTS: dict[str, Any] = {
    "overhead": overhead,
    "evaluation-10-epochs": lambda: evaluation(10),
    "evaluation-1-epoch": lambda: evaluation(1),
    "clients-1000": lambda: clients(1000),
    "clients-10000": lambda: clients(10_000),
    "clients-100000": lambda: clients(100_000),
    "private": private,
}


def said(found: dict[str, Any]) -> list[str]:
    lines = []
    if "overhead" in found:
        o = found["overhead"]
        lines.append(f"not training, 100 clients: {o['other_s'] / (o['other_s'] + o['train_s']):.1%} of a round")
    for part in [p for p in found if p.startswith("evaluation")]:
        e = found[part]
        lines.append(f"{part}, 10,000 central rows: {e['evaluate_s'] / e['train_s']:.2f} of the training")
    if {"clients-1000", "clients-100000"} <= set(found):
        few, many = found["clients-1000"], found["clients-100000"]
        lines.append(f"1,000 to 100,000 clients, cohort 100: {many['per_round_s'] / few['per_round_s']:.2f}x per round")
    if "private" in found:
        p = found["private"]
        lines.append(f"100,000 private MLPs: {p['resident_bytes'] / 2**30:.2f} GiB resident, {p['whole_s']:.0f} s")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(PARTS[given.only]()))
        return
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "scale.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for part in given.parts:
        print(part, file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--only", part]
        found[part] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(said({k: found[k] for k in given.parts})))


if __name__ == "__main__":
    main()
