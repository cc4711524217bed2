"""What is not training, and what many clients cost: `make bench` runs it after the comparison with peers.

Every part is a real run with its folder (checkpoints, lines, private state) in a process of its own, so that
seconds and resident memory are its own. Writes `results/scale.json`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoal import lab
from shoal.cost.timer import Timer
from shoal.data import Federation
from shoal.job import Job
from shoal.types import Examples

RESULTS = Path(__file__).parent / "results"
SHAPE = (1, 28, 28)


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


def played(method: str, fed: Federation, **keys: Any) -> tuple[dict[str, float], list[float], int]:
    """Seconds by part, the moments at which rounds ended, the largest resident memory of all processes, in bytes."""
    timer, ends = Timer(), []
    bench = lab.arrange(Job(method=method, model="mlp", **keys), method, fed)
    with tempfile.TemporaryDirectory() as folder:
        lab.play(bench, Path(folder) / "run", timer=timer, on_round=lambda record: ends.append(time.perf_counter()))
    own, others = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return dict(timer.seconds), ends, (own + others * bench.job.workers) * 1024


def overhead() -> dict[str, Any]:
    """100 clients, all in every round, two epochs of 448 rows: how much of a round is not training."""
    rounds = 6
    spent, ends, _ = played(
        "fedavg", federation(100, 448), rounds=rounds, cohort=1.0, epochs=2, batch_size=64, eval_every=rounds
    )
    evaluated = sum(s for k, s in spent.items() if k.startswith("evaluate"))
    rest = sum(s for k, s in spent.items() if k != "train: clients") - evaluated
    return {"train_s": spent["train: clients"] / rounds, "other_s": rest / rounds, "parts_s": spent}


def evaluation() -> dict[str, Any]:
    """Evaluated in every round: 10 of 100 clients train for an epoch, all 100 and 10,000 central rows are tested."""
    rounds = 8
    fed = federation(100, 448, tested=64, central=10_000)
    spent, _, _ = played("fedavg", fed, rounds=rounds, cohort=10, epochs=1, batch_size=64, eval_every=1)
    tested = {k: s / rounds for k, s in spent.items() if k.startswith("evaluate")}
    return {"train_s": spent["train: clients"] / rounds, "evaluate_s": sum(tested.values()), **tested}


def clients(count: int) -> dict[str, Any]:
    """A cohort of 100 out of `count` clients of 20 rows."""
    rounds = 12
    _, ends, memory = played(
        "fedavg", federation(count, 20), rounds=rounds, cohort=100, epochs=5, batch_size=10, eval_every=rounds
    )
    gaps = [b - a for a, b in zip(ends[2:-1], ends[3:-1], strict=False)]  # the last round is evaluated
    return {"clients": count, "per_round_s": statistics.median(gaps), "resident_bytes": memory}


def private() -> dict[str, Any]:
    """100,000 clients, each with an MLP of its own that it trains and keeps (21 GB of private state on disk)."""
    count, began = 100_000, time.perf_counter()
    _, _, memory = played("local", federation(count, 1), rounds=1, cohort=1.0, epochs=1, batch_size=8)
    return {"clients": count, "resident_bytes": memory, "whole_s": time.perf_counter() - began}


PARTS: dict[str, Any] = {
    "overhead": overhead,
    "evaluation": evaluation,
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
    if "evaluation" in found:
        e = found["evaluation"]
        lines.append(f"evaluation with 10,000 central rows: {e['evaluate_s'] / e['train_s']:.2f} of the training")
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
