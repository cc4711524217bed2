"""Measures the overhead of a round besides training, and the cost of many clients.

Every part is a real run with its run directory (checkpoints, lines, private state) in its own process, so that its
seconds and its resident memory are those of the part alone. A part that fails is a row with the reason, and the others
continue. In the tiny form one process runs all parts. Writes `results/scale.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
from harness import FAILED, OK, Outcome

SHAPE = (1, 28, 28)
NUM_WARMUP_ROUNDS = 2  # not counted, because libraries are loaded and steps are recorded


@dataclass(frozen=True)
class Sizes:
    """The sizes of the benchmark."""

    clients: int = 100
    num_samples: int = 448  # of each client
    central: int = 10_000  # samples of the central test set
    rounds: int = 12  # counted rounds
    cohort: int = 100
    populations: tuple[int, ...] = (1000, 10_000, 100_000)  # clients of which a cohort is selected
    num_personal_models: int = 100_000  # clients with a personal model


FULL = Sizes()
TINY = Sizes(clients=3, num_samples=8, central=8, rounds=1, cohort=2, populations=(4, 8), num_personal_models=4)


class Memory:
    """The largest memory of this process and its workers at any time. Shared pages are counted once."""

    max_bytes = 0

    def __enter__(self) -> Memory:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _poll(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(0.5)
            workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            self.max_bytes = max(self.max_bytes, sum(resident_bytes(pid) for pid in [str(os.getpid()), *workers]))


def resident_bytes(pid: str) -> int:
    try:
        facts = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # the process has just ended
    return int(facts.partition("Pss:")[2].split()[0]) * 1024


def federation(clients: int, num_train_samples: int, num_test_samples: int = 1, central: int = 1) -> Any:
    """Returns a federation of random samples, without a step per client: as fast for 100,000 clients as for ten."""
    import numpy as np
    import torch

    from shoal import Federation
    from shoal.types import Samples

    g = torch.Generator().manual_seed(0)
    sizes = {"train": num_train_samples, "val": 0, "test": num_test_samples}
    starts = np.cumsum([0, *(clients * n for n in sizes.values())])
    bounds = {split: starts[i] + np.arange(clients + 1) * n for i, (split, n) in enumerate(sizes.items())}

    def draw(n: int) -> Samples:
        return Samples(torch.randn(n, *SHAPE, generator=g), torch.randint(0, 10, (n,), generator=g))

    names = tuple(f"c{i:06d}" for i in range(clients))
    return Federation(draw(int(starts[-1])), bounds, names, central=draw(central), classes=tuple("0123456789"))


def run(method: str, fed: Any, **keys: Any) -> tuple[dict[str, float], list[float], int]:
    """Runs a method in a temporary folder.

    Returns
    -------
    tuple[dict[str, float], list[float], int]
        Seconds by part and the moments at which rounds ended, both without the warm-up; and the largest resident
        memory of all processes, in bytes.
    """
    from shoal.cost.timer import Timer
    from shoal.experiment.assemble import assemble
    from shoal.experiment.job import Job
    from shoal.experiment.run import new_run, run_experiment

    timer, ends, warmup_seconds = Timer(), [], {}

    def on_round(record: Any) -> None:
        ends.append(time.perf_counter())
        if record.round == NUM_WARMUP_ROUNDS:
            warmup_seconds.update(timer.seconds)

    experiment = assemble(Job(method=method, model="mlp", **keys), method, fed)
    with (
        tempfile.TemporaryDirectory() as folder,
        new_run(experiment, Path(folder) / "run") as store,
        Memory() as memory,
    ):
        run_experiment(experiment, store, timer=timer, on_round=on_round)
    seconds = {k: s - warmup_seconds.get(k, 0) for k, s in timer.seconds.items()}
    return seconds, ends[NUM_WARMUP_ROUNDS - 1 :], memory.max_bytes


def overhead(sizes: Sizes) -> dict[str, Any]:
    """Returns the fraction of a round that is not training, with all clients in every round and two epochs."""
    rounds = -(-sizes.rounds // 2)
    fed = federation(sizes.clients, sizes.num_samples)
    seconds, _, _ = run(
        "fedavg", fed, rounds=NUM_WARMUP_ROUNDS + rounds, cohort=1.0, epochs=2, batch_size=64, eval_every=100
    )
    evaluate_s = sum(s for k, s in seconds.items() if k.startswith("evaluate"))
    train_s = seconds["train: clients"] / rounds
    other_s = sum(s for k, s in seconds.items() if k != "train: clients") - evaluate_s
    fraction = other_s / rounds / (other_s / rounds + train_s)
    return {"train_s": train_s, "other_s": other_s / rounds, "share_of_round": fraction, "parts_s": seconds}


def evaluation(sizes: Sizes, epochs: int) -> dict[str, Any]:
    """Returns the seconds of an evaluation in every round of all clients and the central test set.

    A tenth of the clients train in a round.
    """
    fed = federation(
        sizes.clients, sizes.num_samples, num_test_samples=-(-sizes.num_samples // 7), central=sizes.central
    )
    rounds, cohort = sizes.rounds, -(-sizes.clients // 10)
    seconds, _, _ = run(
        "fedavg", fed, rounds=NUM_WARMUP_ROUNDS + rounds, cohort=cohort, epochs=epochs, batch_size=64, eval_every=1
    )
    evaluated = {k: s / rounds for k, s in seconds.items() if k.startswith("evaluate")}
    train_s, evaluate_s = seconds["train: clients"] / rounds, sum(evaluated.values())
    return {"train_s": train_s, "evaluate_s": evaluate_s, "times_training": evaluate_s / train_s, **evaluated}


def population(sizes: Sizes, count: int) -> dict[str, Any]:
    """Returns the seconds of a round with a cohort of `count` clients, which have 20 samples each."""
    rounds = max(
        sizes.rounds, NUM_WARMUP_ROUNDS + 2
    )  # at least one counted round, and the last one, which is evaluated
    _, ends, memory = run(
        "fedavg", federation(count, 20), rounds=rounds, cohort=sizes.cohort, epochs=5, batch_size=10, eval_every=rounds
    )
    gaps = [b - a for a, b in pairwise(ends[:-1])]
    return {"clients": count, "per_round_s": statistics.median(gaps), "resident_bytes": memory}


def personal_models(sizes: Sizes) -> dict[str, Any]:
    """Returns the cost of clients with personal MLPs, which take 21 GB of private state for 100,000 clients."""
    start_s = time.perf_counter()
    _, _, memory = run("local", federation(sizes.num_personal_models, 1), rounds=1, cohort=1.0, epochs=1, batch_size=8)
    return {"clients": sizes.num_personal_models, "resident_bytes": memory, "whole_s": time.perf_counter() - start_s}


def parts(sizes: Sizes) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "overhead": partial(overhead, sizes),
        "evaluation-10-epochs": partial(evaluation, sizes, 10),
        "evaluation-1-epoch": partial(evaluation, sizes, 1),
        **{f"clients-{count}": partial(population, sizes, count) for count in sizes.populations},
        "private": partial(personal_models, sizes),
    }


def measure(names: list[str], is_tiny: bool, timeout_s: float) -> list[dict[str, Any]]:
    """Runs parts in one process, and returns their rows."""
    print(", ".join(names), file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--in-this-process", "tiny" if is_tiny else "full", *names]
    outcome = harness.run_process(command, timeout_s)
    measured = {}
    if outcome.status == OK:
        try:
            measured = json.loads(outcome.output)
        except ValueError:
            outcome = Outcome(FAILED, f"printed {outcome.output[-100:]!r} instead of its result")
    return [{"part": name, **outcome.row, **measured.get(name, {})} for name in names]


def sentences(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{r['part']}: {r['reason']}" for r in rows if r["status"] != OK]
    for r in [r for r in rows if r["status"] == OK]:
        if r["part"] == "overhead":
            lines.append(f"not training: {r['share_of_round']:.1%} of a round")
        elif r["part"].startswith("evaluation"):
            lines.append(f"{r['part']}: {r['times_training']:.2f} of the training")
        elif r["part"] == "private":
            size = r["resident_bytes"] / 2**30
            lines.append(f"{r['clients']:,} personal MLPs: {size:.2f} GiB resident, {r['whole_s']:.0f} s")
        else:
            times = "" if r["times_smallest"] is None else f" ({r['times_smallest']:.2f}x)"
            lines.append(f"{r['clients']:,} clients: {r['per_round_s']:.3f} s per round{times}")
    return lines


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds to each population the ratio of its seconds per round to those of the smallest one."""
    populations = [r for r in rows if "per_round_s" in r]
    for r in populations:
        r["times_smallest"] = r["per_round_s"] / populations[0]["per_round_s"]


def main() -> int:
    if sys.argv[1:2] == ["--in-this-process"]:
        size, *names = sys.argv[2:]
        all_parts = parts(TINY if size == "tiny" else FULL)
        print(json.dumps({name: all_parts[name]() for name in names}))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(parts(FULL)), help="Parts to measure. Default: all.")
    parser.add_argument(
        "--timeout-s", type=harness.parse_seconds, default=7200, help="Seconds after which a part ends. Default: 7200."
    )
    options, run = harness.begin(parser, "scale.json", {"parts": list(parts(TINY))})
    all_parts = parts(TINY if options.tiny else FULL)
    for name in options.parts:
        if name not in all_parts:
            parser.error(f"--parts has {name!r}; it must be some of {', '.join(all_parts)}.")
    rows: list[dict[str, Any]] = []
    for names in [options.parts] if options.tiny else [[name] for name in options.parts]:
        rows += measure(names, options.tiny, options.timeout_s)
    add_ratios(rows)
    run.write(rows=rows)
    print("\n".join(sentences(rows)))
    return int(any(row["status"] != OK for row in rows))


if __name__ == "__main__":
    harness.call(main)
