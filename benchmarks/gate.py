"""Measures the seconds of a prediction by SCMoE-PFL's gate, relative to the models that a prediction needs.

A sample needs three models: the personal model and the two experts that the gate selects of J. The gate runs all models
for all samples. The reference, 1.0, is running three models one after the other. The results are medians over
alternating turns, on one thread. Writes `results/gate.json`.
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
    """Returns the median seconds of each work, measured in turns, so that a busy machine affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(NUM_WARMUP_TURNS + turns):
        for name, work in works.items():
            start_s = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start_s)
    return {name: median(spent[NUM_WARMUP_TURNS:]) for name, spent in seconds.items()}


def measure_ratios(model: Model, num_samples: int, num_experts: int, turns: int) -> dict[str, float]:
    """Returns the seconds of three models, and the ratio of the gate's seconds to them."""
    gate, x = Gate(), torch.randn(num_samples, *model.input_shape)
    experts = {f"expert-{k:03d}": model.init(k) for k in range(num_experts)}
    weights = gate.init(x[0].numel(), 1 + num_experts, 0)
    trained = {k: v + 0.1 * torch.randn(v.shape) for k, v in weights.items()}
    fingerprints = torch.stack(
        [m[model.trainable[-1]] for m in experts.values()]
    )  # of the experts for which the gate was trained
    private = {"model": model.init(99), "gate": trained, "experts": {"marks": fingerprints}}
    predict, three = gated_predict(model, gate), [private["model"], *experts.values()][:3]
    with torch.no_grad():
        seconds = median_seconds(
            {
                "three": lambda: [model.predict(m, x) for m in three],
                "gate": lambda: predict(experts, private, x),
            },
            turns,
        )
    return {"three_models_s": seconds["three"], "gate": seconds["gate"] / seconds["three"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, harness.parse_positive
    add("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="Models of the experts. Default: all.")
    add("--samples", nargs="+", type=positive, default=[32, 256], help="Samples per prediction. Default: 32 256.")
    add("--experts", nargs="+", type=positive, default=[2, 3, 4, 10], help="Numbers of experts. Default: 2 3 4 10.")
    add("--turns", type=positive, default=22, help="Number of measurements. Default: 22.")
    tiny = {"models": ["mlp"], "samples": [2], "experts": [2, 3], "turns": 1}
    options, run = harness.begin(parser, "gate.json", tiny)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'model':10} {'samples':>7} {'experts':>7} {'three models':>13} {'gate':>6}")
    for name in options.models:
        model = load_model(name, SHAPES[name], 10)
        for samples in options.samples:
            for experts in options.experts:
                row = measure_ratios(model, samples, experts, options.turns)
                ms = 1000 * row["three_models_s"]
                cells = f"{ms:10.2f} ms {row['gate']:6.2f}"
                print(f"{name:10} {samples:7} {experts:7} {cells}", flush=True)
                rows.append({"model": name, "samples": samples, "experts": experts, **row})
    run.write(rows=rows)


if __name__ == "__main__":
    harness.call(main)
