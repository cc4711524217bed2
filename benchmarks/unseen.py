"""Clients that never trained, through the service: what EM makes of 20, 50 or 200 inputs without labels.

For each run it starts `shoal serve`. Every unseen client is a caller of its own, which sends inputs to /v1/prior, takes
the answer back, and asks with it for the labels of all its samples. Beside it stands what `shoal evaluate` computes
without a service from the same inputs: the two must agree, sample for sample. A run that fails is a row with the
reason, and the others go on. Writes `results/unseen.json`.

    python benchmarks/unseen.py runs/own-quick/fashion-dir01/shoal-*
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import torch
from harness import FAILED, OK, Outcome

from shoal import UserError
from shoal.engine import without_labels
from shoal.experiment.assemble import assemble_job
from shoal.experiment.job import Job, make_job
from shoal.experiment.run import run_job
from shoal.serve.remote import Remote
from shoal.store.run_directory import RunStore
from shoal.study.unseen import evaluate_unseen_ways
from shoal.types import ClientId, Samples

REQUEST_SAMPLES = 256  # of one request


@contextmanager
def running_service(run: Path) -> Iterator[str]:
    """Starts a server of the run, and gives its address."""
    command = [sys.executable, "-m", "shoal", "serve", str(run), "--port", "0", "--rate", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    words = ""
    try:
        for line in process.stderr:
            words = harness.last_words(line) or words
            if " on http" in line:
                yield line.split(" on ")[1].strip()
                return
        raise UserError(f"the server of {run} did not start: {words}")
    finally:
        process.terminate()
        process.wait(30)


def accuracy(url: str, samples: Samples, prior_inputs: Samples | None, classes: list[str]) -> float:
    with Remote(url) as remote:
        if prior_inputs is not None:
            remote.estimate_prior(prior_inputs.x.numpy(), prepared=True)
        parts = torch.split(samples.x, REQUEST_SAMPLES)
        labels = [label for part in parts for label in remote.predict(part.numpy(), prepared=True).labels]
    return fmean(classes[y] == label for y, label in zip(samples.y.tolist(), labels, strict=True))


def accuracy_through_service(
    run: Path, unseen: Mapping[ClientId, Samples], inputs: Sequence[int], seed: int
) -> dict[str, dict[ClientId, float]]:
    """Returns the accuracy of each client, by how many inputs the service was given before."""
    classes = json.loads((run / "inputs.json").read_text())["classes"]
    with running_service(run) as url:

        def with_inputs(count: int | None) -> dict[ClientId, float]:
            seen = {
                c: None if count is None else without_labels(samples, c, count, seed) for c, samples in unseen.items()
            }
            return {c: accuracy(url, samples, seen[c], classes) for c, samples in unseen.items()}

        return {"none": with_inputs(None)} | {str(n): with_inputs(n) for n in inputs}


def measure(run: Path, inputs: Sequence[int]) -> dict[str, Any]:
    """Returns the row of a run."""
    with RunStore.open(run) as store:
        bench = assemble_job(make_job(store.config))
        if not bench.federation.unseen:
            raise UserError(f"{run} has no unseen clients: name a run that was started with --unseen")
        without_service = evaluate_unseen_ways(bench, store.load_final_state(), inputs)
    with_service = accuracy_through_service(run, bench.federation.unseen, inputs, bench.job.seed)
    largest = max(
        abs(without_service[how]["clients"][c] - a)
        for how, of_clients in with_service.items()
        for c, a in of_clients.items()
    )
    agreed = Outcome(FAILED, "the service and shoal evaluate do not agree") if largest else Outcome(OK)
    return agreed.row | {
        "clients": len(bench.federation.unseen),
        "evaluate": {how: figures["mean"] for how, figures in without_service.items()},
        "service": {how: fmean(of_clients.values()) for how, of_clients in with_service.items()},
        "largest_difference_of_a_client": largest,
    }


def attempt(run: Path, inputs: Sequence[int]) -> dict[str, Any]:
    try:
        row = measure(run, inputs)
    except UserError as error:
        row = Outcome(FAILED, str(error)).row
    return {"run": f"{run.parent.name}/{run.name}", **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="Finished runs of shoal with unseen clients.")
    parser.add_argument(
        "--inputs", nargs="+", type=harness.require_positive, default=[20, 50, 200], help="Default: 20 50 200."
    )
    options, run = harness.begin(parser, "unseen.json", {"inputs": [5]}, inputs=("runs",))
    if not options.runs and not options.tiny:
        parser.error("no runs: name the folders of finished runs that were started with --unseen")
    for path in options.runs:
        if not (path / "config.json").is_file():
            parser.error(f"runs has {path}, which is not the folder of a run: it has no config.json")
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or [Path(folder) / "tiny"]
        if not options.runs:
            run_job(Job(method="shoal", clients=6, cohort=2, unseen=1, rounds=1, fleet="vector"), runs[0])
        rows = []
        for path in runs:
            rows.append(attempt(path, options.inputs))
            print(json.dumps(rows[-1]), flush=True)
    run.write(rows=rows)
    return int(any(row["status"] != OK for row in rows))


if __name__ == "__main__":
    harness.call(main)
