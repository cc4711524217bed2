"""Measures the accuracy of unseen clients through the service, with a class prior from 20, 50 or 200 inputs.

The benchmark starts `shoal serve` for each run. Every unseen client sends inputs without labels to /v1/prior, and uses
the estimated prior in its requests for predictions of all its samples. `shoal evaluate` computes the same accuracies
without a service from the same inputs, and both must agree for every client. A run that fails is a row with the reason,
and the others continue. Writes `results/unseen.json`.

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

REQUEST_SAMPLES = 256  # samples of a request


@contextmanager
def running_service(run: Path) -> Iterator[str]:
    """Starts a server of the run, and yields its address."""
    command = [sys.executable, "-m", "shoal", "serve", str(run), "--port", "0", "--max-requests-per-s", "0"]
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
    """Returns the accuracy of each client, by the number of inputs that the service got for the prior."""
    classes = json.loads((run / "inputs.json").read_text())["classes"]
    with running_service(run) as url:

        def with_inputs(count: int | None) -> dict[ClientId, float]:
            prior_inputs = {
                c: None if count is None else without_labels(samples, c, count, seed) for c, samples in unseen.items()
            }
            return {c: accuracy(url, samples, prior_inputs[c], classes) for c, samples in unseen.items()}

        return {"none": with_inputs(None)} | {str(n): with_inputs(n) for n in inputs}


def measure(run: Path, inputs: Sequence[int]) -> dict[str, Any]:
    """Returns the row of a run."""
    with RunStore.open(run) as store:
        experiment = assemble_job(make_job(store.config))
        if not experiment.federation.unseen:
            raise UserError(f"{run} has no unseen clients: name a run that was started with --unseen.")
        without_service = evaluate_unseen_ways(experiment, store.load_final_state(), inputs)
    with_service = accuracy_through_service(run, experiment.federation.unseen, inputs, experiment.job.seed)
    largest = max(
        abs(without_service[way]["accuracy_by_client"][c] - a)
        for way, accuracies in with_service.items()
        for c, a in accuracies.items()
    )
    outcome = Outcome(FAILED, "the service and shoal evaluate do not agree") if largest else Outcome(OK)
    return outcome.row | {
        "clients": len(experiment.federation.unseen),
        "evaluate": {way: facts["accuracy"] for way, facts in without_service.items()},
        "service": {way: fmean(accuracies.values()) for way, accuracies in with_service.items()},
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
        "--num-inputs",
        nargs="+",
        type=harness.parse_positive,
        default=[20, 50, 200],
        help="Numbers of inputs for the prior. Default: 20 50 200.",
    )
    options, run = harness.begin(parser, "unseen.json", {"num_inputs": [5]}, inputs=("runs",))
    if not options.runs and not options.tiny:
        parser.error("no runs are given. Name the folders of finished runs that were started with --unseen.")
    for path in options.runs:
        if not (path / "config.json").is_file():
            parser.error(f"runs has {path}, which is not a run directory: it has no config.json.")
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or [Path(folder) / "tiny"]
        if not options.runs:
            run_job(Job(method="shoal", clients=6, cohort=2, unseen=1, rounds=1, fleet="vector"), runs[0])
        rows = []
        for path in runs:
            rows.append(attempt(path, options.num_inputs))
            print(json.dumps(rows[-1]), flush=True)
    run.write(rows=rows)
    return int(any(row["status"] != OK for row in rows))


if __name__ == "__main__":
    harness.call(main)
