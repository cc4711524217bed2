"""How fleets compare on the same work, as ratios in one run: `make bench`.

Ten clients of 448 rows, batches of 64, as many epochs as given; fleets take turns, so that a busy machine
disturbs them alike. The figure is the median over rounds of the training stage alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from shoal.data import Federation
from shoal.experiment.assemble import arrange, make_fleet
from shoal.experiment.job import Job
from shoal.types import Examples, Plan

WORK = {
    "mlp": ((1, 28, 28), 10, ("plain", "vector", "pool", "flower")),
    "cnn-cifar": ((3, 32, 32), 2, ("plain", "pool", "flower")),  # stacked convolutions are far too slow here
}


def federation(shape: tuple[int, ...], clients: int = 10, rows: int = 448) -> Federation:
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> Examples:
        return Examples(torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g))

    data = {f"c{i}": {"train": draw(rows), "val": draw(10), "test": draw(10)} for i in range(clients)}
    return Federation.from_clients(data, draw(10), tuple("0123456789"))


def seconds(model: str, rounds: int) -> dict[str, float]:
    shape, epochs, names = WORK[model]
    fed = federation(shape)
    job = Job(model=model, epochs=epochs, batch_size=64, cohort=1.0, clients=10)
    bench = arrange(job, "fedavg", fed)
    state = bench.method.init(0)
    train = bench.method.stages[1]
    fleets = {name: make_fleet(arrange(job.model_copy(update={"fleet": name}), "fedavg", fed)) for name in names}
    spent: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds + 1):
        tasks = train.plan(replace(state, cohort=tuple(fed)), r).tasks
        for name, fleet in fleets.items():
            begun = time.perf_counter()
            fleet.execute(Plan(train.programs[0], tasks))
            spent[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times[1:]) for name, times in spent.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(WORK), choices=list(WORK))
    given = parser.parse_args()
    results = {}
    for model in given.models:
        times = results[model] = seconds(model, given.rounds)
        print(f"{model}: " + "  ".join(f"{n} {s:.3f} s ({times['plain'] / s:.2f}x)" for n, s in times.items()))
    out = Path(__file__).parent / "results"
    out.mkdir(exist_ok=True)
    (out / "fleets.json").write_text(json.dumps({"threads": torch.get_num_threads(), "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
