"""What a prediction by SCMoE-PFL's gate costs, as times the cost of running the models that count for a row.

For J experts beside the private model, of which two count: the gate as it predicts, with all models run for all
samples, against three models run one after the other (1.0). Medians over turns that alternate, on one thread. Writes
`results/gate.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import harness
import torch

from shoal.client.gate import Gate, gated_predict
from shoal.models import Model, load_model

SHAPES = {"mlp": (1, 28, 28), "cnn-cifar": (3, 32, 32)}
NUM_WARMUP_TURNS = 3  # turns that are not counted


def median_seconds(works: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Returns the median of each, measured in turns, so that a busy moment of the machine meets all."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(NUM_WARMUP_TURNS + turns):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begun)
    return {name: median(spent[NUM_WARMUP_TURNS:]) for name, spent in found.items()}


def measure_ratios(model: Model, num_samples: int, num_experts: int, turns: int) -> dict[str, float]:
    """Returns the seconds of three models, and how many times as long the gate takes."""
    gate, x = Gate(), torch.randn(num_samples, *model.input_shape)
    experts = {f"expert-{k:03d}": model.init(k) for k in range(num_experts)}
    weights = gate.init(x[0].numel(), 1 + num_experts, 0)
    trained = {k: v + 0.1 * torch.randn(v.shape) for k, v in weights.items()}
    marks = torch.stack([m[model.trainable[-1]] for m in experts.values()])  # the gate is for just these
    private = {"model": model.init(99), "gate": trained, "experts": {"marks": marks}}
    predict, three = gated_predict(model, gate), [private["model"], *experts.values()][:3]
    with torch.no_grad():
        took = median_seconds(
            {
                "three": lambda: [model.predict(m, x) for m in three],
                "gate": lambda: predict(experts, private, x),
            },
            turns,
        )
    return {"three_models_s": took["three"], "gate": took["gate"] / took["three"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, harness.require_positive
    add("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="Default: all.")
    add("--rows", nargs="+", type=positive, default=[32, 256], help="Rows of one prediction. Default: 32 256.")
    add("--experts", nargs="+", type=positive, default=[2, 3, 4, 10], help="Numbers of experts. Default: 2 3 4 10.")
    add("--turns", type=positive, default=22, help="How often each is measured. Default: 22.")
    tiny = {"models": ["mlp"], "rows": [2], "experts": [2, 3], "turns": 1}
    options, run = harness.begin(parser, "gate.json", tiny)
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    print(f"{'model':10} {'rows':>5} {'experts':>7} {'three models':>13} {'gate':>6}")
    for name in options.models:
        model = load_model(name, SHAPES[name], 10)
        for rows in options.rows:
            for experts in options.experts:
                row = measure_ratios(model, rows, experts, options.turns)
                ms = 1000 * row["three_models_s"]
                figures = f"{ms:10.2f} ms {row['gate']:6.2f}"
                print(f"{name:10} {rows:5} {experts:7} {figures}", flush=True)
                found.append({"model": name, "rows": rows, "experts": experts, **row})
    run.write(rows=found)


if __name__ == "__main__":
    harness.call(main)
