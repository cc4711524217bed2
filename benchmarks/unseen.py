"""Clients that never trained, through the service: what EM makes of 20, 50 or 200 inputs without labels.

For each run it starts `shoal serve`. Every held-out client is a caller of its own, which sends inputs to /v1/prior,
takes what it is given back, and asks with it for the labels of all its rows. Beside it stands what `shoal evaluate`
computes without a service from the same inputs: the two must agree, row for row.

    python benchmarks/unseen.py runs/own-quick/fashion-dir01/shoal-*
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch

from shoal.engine import unlabelled
from shoal.experiment.assemble import setup
from shoal.experiment.job import make_job
from shoal.serve.remote import Remote
from shoal.store.run_directory import RunStore
from shoal.study.unseen import unseen_figures
from shoal.types import ClientId, Examples

RESULT = Path(__file__).parent / "results/unseen.json"
ROWS = 256  # of one request
INPUTS = (20, 50, 200)


@contextmanager
def served(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "shoal", "serve", str(run), "--port", "0", "--rate", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield next(line.split(" on ")[1].strip() for line in process.stderr if " on http" in line)
    finally:
        process.terminate()
        process.wait(30)


def accuracy(url: str, rows: Examples, seen: Examples | None, classes: list[str]) -> float:
    with Remote(url) as remote:
        if seen is not None:
            remote.learn(seen.x.numpy(), prepared=True)
        parts = torch.split(rows.x, ROWS)
        said = [label for part in parts for label in remote.predict(part.numpy(), prepared=True).labels]
    return fmean(classes[y] == label for y, label in zip(rows.y.tolist(), said, strict=True))


def through_the_service(run: Path, held: Mapping[ClientId, Examples], seed: int) -> dict[str, dict[ClientId, float]]:
    classes = json.loads((run / "inputs.json").read_text())["classes"]
    with served(run) as url:

        def asked(inputs: int | None) -> dict[ClientId, float]:
            seen = {c: None if inputs is None else unlabelled(rows, c, inputs, seed) for c, rows in held.items()}
            return {c: accuracy(url, rows, seen[c], classes) for c, rows in held.items()}

        return {"none": asked(None)} | {str(n): asked(n) for n in INPUTS}


def measured(run: Path) -> dict[str, object]:
    with RunStore.open(run) as store:
        bench = setup(make_job(store.config))
        here = unseen_figures(bench, store.last(), INPUTS)
    there = through_the_service(run, bench.federation.unseen, bench.job.seed)
    apart = max(abs(here[how]["clients"][c] - a) for how, found in there.items() for c, a in found.items())
    return {
        "run": f"{run.parent.name}/{run.name}",
        "clients": len(bench.federation.unseen),
        "evaluate": {how: figures["mean"] for how, figures in here.items()},
        "service": {how: fmean(found.values()) for how, found in there.items()},
        "largest difference of a client": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="finished runs of shoal with held-out clients")
    found = []
    for run in parser.parse_args().runs:
        found.append(measured(run))
        print(json.dumps(found[-1]), flush=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
