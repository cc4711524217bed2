"""What learning APCSMA's coefficients costs, as a share of the time in which clients train.

50 clients, Dirichlet 0.1, 7 of them a round, one epoch in batches of 64, as in the paper; 50 public rows. Learning is
both calls of a round: for the selection, over the models of all clients, and for the aggregation. One client after the
other on one thread, so that both are seconds of the same processor. The first round, in which everybody trains, is left
out: the share would be smaller there. Writes `results/contribution.json`.
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
    """The same coefficients, and the seconds that they took."""

    durations_s: list[float] = []  # noqa: RUF012

    def learn(self, *args: object) -> np.ndarray:
        begun = time.perf_counter()
        found = super().learn(*args)  # type: ignore[arg-type]
        self.durations_s.append(time.perf_counter() - begun)
        return found


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
    state, ledger, found = method.init(0), Ledger(), []
    for number in range(rounds + 1):
        TimedCoefficients.durations_s.clear()
        before = timer.seconds["train: clients"]
        state, record, _ = engine.run_round(method, fleet, state, 0, ledger, timer)
        train_s, learn_s = timer.seconds["train: clients"] - before, sum(TimedCoefficients.durations_s)
        if number:
            found.append({"round": record.round, "learn_s": learn_s, "train_s": train_s, "share": learn_s / train_s})
            print(f"round {record.round}: {learn_s:.2f} s learning, {train_s:.2f} s training, {learn_s / train_s:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist", help="Name of the data set. Default: fashion-mnist.")
    parser.add_argument("--model", default="cnn-fedavg", help="Name of the network. Default: cnn-fedavg.")
    parser.add_argument("--rows", type=int, default=0, help="Training samples of the data set. Default: 0, all.")
    parser.add_argument(
        "--rounds", type=harness.require_positive, default=5, help="Rounds that are counted. Default: 5."
    )
    parser.add_argument("--clients", type=harness.require_positive, default=50, help="Default: 50.")
    parser.add_argument("--cohort", type=harness.require_positive, default=7, help="Clients per round. Default: 7.")
    parser.add_argument("--public", type=int, default=50, help="Public samples. Default: 50.")
    tiny = {"data": "digits", "model": "mlp", "rounds": 1, "clients": 4, "cohort": 2, "public": 10}
    options, run = harness.begin(parser, "contribution.json", tiny)
    torch.set_num_threads(1)
    dataset = load(options.data, seed=0, clients=options.clients, max_train_samples=options.rows or None)
    federation = partition(dataset, "dirichlet:0.1", clients=options.clients, seed=0, public_samples=options.public)
    model = load_model(options.model, federation.input_shape, len(federation.classes))
    training = {"rounds": 99, "cohort": options.cohort, "epochs": 1, "batch_size": 64, "lr": 0.005}
    method = build("apcsma", Setting(model, **training, public_samples=federation.public_samples))
    rows = measure(with_timed_coefficients(method), federation, options.rounds)
    share = median(row["share"] for row in rows)
    run.write(share_of_training=share, rows=rows)
    print(f"{options.model}: {share:.2f} of the training time (median of {options.rounds} rounds)")


if __name__ == "__main__":
    harness.call(main)
