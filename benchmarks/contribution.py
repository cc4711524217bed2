"""What learning APCSMA's coefficients costs, as a share of the time in which clients train.

    python benchmarks/contribution.py [--data fashion-mnist] [--model cnn-fedavg] [--rows 0] [--rounds 5]

50 clients, Dirichlet 0.1, 7 of them a round, one epoch in batches of 64, as in the paper; 50 public rows. Learning is
both calls of a round: for the selection, over the models of all clients, and for the aggregation. One client after the
other on one thread, so that both are seconds of the same processor. The first round, in which everybody trains, is left
out: the share would be smaller there.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from shoal import engine
from shoal.cost.ledger import Ledger
from shoal.cost.timer import Timer
from shoal.data import load, partition
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.contribution import Coefficients


class Clocked(Coefficients):
    """The same coefficients, and the seconds that they took."""

    spent: list[float] = []  # noqa: RUF012

    def learned(self, *args: object) -> np.ndarray:
        begun = time.perf_counter()
        found = super().learned(*args)  # type: ignore[arg-type]
        self.spent.append(time.perf_counter() - begun)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="cnn-fedavg")
    parser.add_argument("--rows", type=int, default=0, help="of the data; 0: all")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load(asked.data, seed=0, clients=50, rows=asked.rows or None)
    federation = partition(dataset, "dirichlet:0.1", clients=50, seed=0, public=50)
    model = load_model(asked.model, federation.input_shape, len(federation.classes))
    setting = Setting(model, rounds=99, cohort=7, epochs=1, batch_size=64, lr=0.005, public=federation.public)
    method, timer, fleet = build("apcsma", setting), Timer(), PlainFleet(federation)
    stages = []
    for stage in method.stages:
        held = getattr(stage, "coefficients", None)
        clocked = Clocked(**vars(held)) if held is not None else None
        stages.append(replace(stage, coefficients=clocked) if clocked else stage)  # type: ignore[type-var]
    method = replace(method, stages=tuple(stages))
    state, ledger = method.init(0), Ledger()
    shares = []
    for number in range(asked.rounds + 1):
        Clocked.spent.clear()
        before = timer.seconds["train: clients"]
        state, record, _ = engine.play_round(method, fleet, state, 0, ledger, timer)
        trained_s, learned_s = timer.seconds["train: clients"] - before, sum(Clocked.spent)
        if number:
            shares.append(learned_s / trained_s)
            print(f"round {record.round}: {learned_s:.2f} s learning, {trained_s:.2f} s training, {shares[-1]:.2f}")
    print(f"{asked.model}: {median(shares):.2f} of the training time (median of {asked.rounds} rounds)")


if __name__ == "__main__":
    main()
