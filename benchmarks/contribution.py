"""Measures the seconds of learning APCSMA's coefficients, as a fraction of the seconds in which clients train.

The setting is that of the paper: 50 clients, Dirichlet 0.1, 7 clients per round, one epoch in batches of 64, and 50
public samples. Learning has two calls per round: one for the selection, over the models of all clients, and one for the
aggregation. Clients train one after the other on one thread, so that all seconds are those of the same processor. The
first round, in which all clients train, is left out, because the fraction is smaller there. Writes
`results/contribution.json`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import harness
import numpy as np
import torch

from shoal import Federation, Setting, engine, load, partition
from shoal.cost.ledger import Ledger
from shoal.cost.timer import Timer
from shoal.fleet.plain import PlainFleet
from shoal.methods import build
from shoal.models import load_model
from shoal.stages.contribution import Coefficients
from shoal.types import Method


class TimedCoefficients(Coefficients):
    """The same coefficients, with the seconds of learning them."""

    durations_s: list[float] = []  # noqa: RUF012

    def learn(self, *args: object) -> np.ndarray:
        start_s = time.perf_counter()
        coefficients = super().learn(*args)  # type: ignore[arg-type]
        self.durations_s.append(time.perf_counter() - start_s)
        return coefficients


def with_timed_coefficients(method: Method) -> Method:
    """Returns the method with coefficients that count their seconds."""
    stages = []
    for stage in method.stages:
        coefficients = getattr(stage, "coefficients", None)
        stages.append(
            replace(stage, coefficients=TimedCoefficients(**vars(coefficients))) if coefficients is not None else stage
        )
    return replace(method, stages=tuple(stages))


def measure(method: Method, federation: Federation, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each round but the first."""
    timer, fleet = Timer(), PlainFleet(federation)
    state, ledger, rows = method.init(0), Ledger(), []
    for round_index in range(rounds + 1):
        TimedCoefficients.durations_s.clear()
        before = timer.seconds["train: clients"]
        state, record, _ = engine.run_round(method, fleet, state, 0, ledger, timer)
        train_s, learn_s = timer.seconds["train: clients"] - before, sum(TimedCoefficients.durations_s)
        if round_index:
            rows.append({"round": record.round, "learn_s": learn_s, "train_s": train_s, "share": learn_s / train_s})
            print(f"round {record.round}: {learn_s:.2f} s learning, {train_s:.2f} s training, {learn_s / train_s:.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist", help="Name of the data set. Default: fashion-mnist.")
    parser.add_argument("--model", default="cnn-fedavg", help="Name of the network. Default: cnn-fedavg.")
    parser.add_argument(
        "--max-train-samples", type=int, default=0, help="Training samples of the data set. Default: 0, all."
    )
    parser.add_argument("--rounds", type=harness.parse_positive, default=5, help="Rounds that are counted. Default: 5.")
    parser.add_argument("--clients", type=harness.parse_positive, default=50, help="Clients. Default: 50.")
    parser.add_argument("--cohort", type=harness.parse_positive, default=7, help="Clients per round. Default: 7.")
    parser.add_argument("--public-samples", type=int, default=50, help="Public samples. Default: 50.")
    tiny = {"data": "digits", "model": "mlp", "rounds": 1, "clients": 4, "cohort": 2, "public_samples": 10}
    options, run = harness.begin(parser, "contribution.json", tiny)
    torch.set_num_threads(1)
    dataset = load(options.data, seed=0, clients=options.clients, max_train_samples=options.max_train_samples or None)
    federation = partition(
        dataset, "dirichlet:0.1", clients=options.clients, seed=0, public_samples=options.public_samples
    )
    model = load_model(options.model, federation.input_shape, len(federation.classes))
    training = {"rounds": 99, "cohort_size": options.cohort, "epochs": 1, "batch_size": 64, "lr": 0.005}
    method = build("apcsma", Setting(model, **training, public_samples=federation.public_samples))
    rows = measure(with_timed_coefficients(method), federation, options.rounds)
    share = median(row["share"] for row in rows)
    run.write(share_of_training=share, rows=rows)
    print(f"{options.model}: {share:.2f} of the training time (median of {options.rounds} rounds)")


if __name__ == "__main__":
    harness.call(main)
