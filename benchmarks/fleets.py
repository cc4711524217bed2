"""Compares the fleets on the same work, as ratios of seconds.

Ten clients have 448 samples each and train in batches of 64. Fleets take turns, so that a busy machine affects all of
them equally. The result is the median over rounds of the seconds of the training stage alone. A fleet that cannot be
created or fails is a row with the reason, and the others continue. Writes `results/fleets.json`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import harness
import torch
from harness import FAILED, OK, Outcome

from shoal.data import Federation
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.types import Fleet, Plan, Samples


@dataclass(frozen=True)
class Work:
    shape: tuple[int, ...]
    epochs: int
    fleets: tuple[str, ...]
    clients: int = 10
    num_samples: int = 448


WORKS = {
    "mlp": Work((1, 28, 28), 10, ("plain", "vector", "pool", "flower")),
    "cnn-cifar": Work((3, 32, 32), 2, ("plain", "pool", "flower")),  # stacked convolutions are too slow on a CPU
}
TINY_WORKS = {
    "mlp": replace(WORKS["mlp"], shape=(1, 4, 4), epochs=1, clients=2, num_samples=16),
    "cnn-cifar": replace(WORKS["cnn-cifar"], shape=(1, 22, 22), epochs=1, clients=2, num_samples=16),
}


@dataclass
class Measurement:
    """The measurements of a fleet, up to its failure if it failed."""

    outcome: Outcome = field(default_factory=lambda: Outcome(OK))
    fleet: Fleet | None = None
    round_s: list[float] = field(default_factory=list)

    def attempt(self, action: Callable[[Any], Any], argument: Any) -> Any:
        """Returns what the action returns, or None if it fails."""
        try:
            return action(argument)
        except Exception as error:  # whatever the error is, the other fleets continue
            self.outcome = Outcome(FAILED, f"{type(error).__name__}: {error}")
            return None

    def execute(self, plan: Plan) -> None:
        start_s = time.perf_counter()
        assert self.fleet is not None
        self.fleet.execute(plan)
        self.round_s.append(time.perf_counter() - start_s)


def federation(work: Work) -> Federation:
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> Samples:
        return Samples(torch.randn(n, *work.shape, generator=g), torch.randint(0, 10, (n,), generator=g))

    data = {f"c{i}": {"train": draw(work.num_samples), "val": draw(10), "test": draw(10)} for i in range(work.clients)}
    return Federation.from_clients(data, draw(10), tuple("0123456789"))


def measure(model: str, work: Work, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each fleet."""
    data = federation(work)
    job = Job(model=model, epochs=work.epochs, batch_size=64, cohort=1.0, clients=work.clients)
    experiment = assemble(job, "fedavg", data)
    state = experiment.method.init(0)
    train = experiment.method.stages[1]
    measurements = {name: Measurement() for name in work.fleets}
    for name, m in measurements.items():
        fleet_experiment = assemble(job.model_copy(update={"fleet": name}), "fedavg", data)
        m.fleet = m.attempt(make_fleet, fleet_experiment)
        if name == "flower":
            m.outcome = harness.missing(["flwr"], "pip install -e '.[flower]'") or m.outcome
    for r in range(1 + rounds):
        tasks = train.plan(replace(state, cohort=tuple(data)), r).tasks
        for m in measurements.values():
            if m.outcome.status == OK:
                m.attempt(m.execute, Plan(train.programs[0], tasks))
    return result_rows(model, measurements)


def result_rows(model: str, measurements: dict[str, Measurement]) -> list[dict[str, Any]]:
    # The first round warms up.
    seconds = {name: statistics.median(m.round_s[1:]) if m.round_s[1:] else None for name, m in measurements.items()}
    plain_s = seconds["plain"]
    return [
        {
            "model": model,
            "fleet": name,
            **m.outcome.row,
            "per_round_s": seconds[name],
            "times_as_fast_as_plain": plain_s / seconds[name] if plain_s and seconds[name] else None,
        }
        for name, m in measurements.items()
    ]


def sentence(row: dict[str, Any]) -> str:
    if row["status"] != OK:
        return f"{row['model']}: {row['fleet']}: {row['reason']}"
    ratio = row["times_as_fast_as_plain"]
    return f"{row['model']}: {row['fleet']} {row['per_round_s']:.3f} s" + (f" ({ratio:.2f}x)" if ratio else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=harness.parse_positive, default=3, help="Rounds that are counted. Default: 3.")
    parser.add_argument(
        "--models", nargs="+", default=list(WORKS), choices=list(WORKS), help="Models to train. Default: all."
    )
    options, run = harness.begin(parser, "fleets.json", {"rounds": 1})
    works, rows = TINY_WORKS if options.tiny else WORKS, []
    for model in options.models:
        rows += measure(model, works[model], options.rounds)
        print("\n".join(sentence(row) for row in rows if row["model"] == model), flush=True)
    run.write(threads=torch.get_num_threads(), rows=rows)
    return int(any(row["status"] == FAILED for row in rows))


if __name__ == "__main__":
    harness.call(main)
