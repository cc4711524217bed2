"""What a prediction by SCMoE-PFL's gate costs, as times the cost of running the models that count for a row.

    python benchmarks/gate.py

For J experts beside the private model, of which two count: the gate as it serves (every model run only for the rows
whose priors let it count, `routed`), the same with all models run for all rows (`dense`), and three models run one
after the other (1.0). Medians over turns that alternate, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from shoal.client.gate import Gate, gated_predict, routed_predict
from shoal.models import Model, load_model

TURNS = 25


def seconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each, in turns, so that a busy moment of the machine meets all."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - begun)
    return {name: median(turns[3:]) for name, turns in found.items()}


def ratios(model: Model, rows: int, count: int) -> tuple[float, float, float]:
    """Seconds of three models, and times that of the gate, routed and dense."""
    gate, x = Gate(), torch.randn(rows, *model.input_shape)
    experts = {f"expert-{k:03d}": model.init(k) for k in range(count)}
    weights = gate.init(x[0].numel(), 1 + count, 0)
    trained = {k: v + 0.1 * torch.randn(v.shape) for k, v in weights.items()}
    marks = torch.stack([m[model.trainable[-1]] for m in experts.values()])  # the gate is for just these
    private = {"model": model.init(99), "gate": trained, "experts": {"marks": marks}}
    dense, three = gated_predict(model, gate), [private["model"], *experts.values()][:3]
    with torch.no_grad():
        took = seconds(
            {
                "three": lambda: [model.predict(m, x) for m in three],
                "routed": lambda: routed_predict(model, gate, experts, private, x),
                "dense": lambda: dense(experts, private, x),
            }
        )
    return took["three"], took["routed"] / took["three"], took["dense"] / took["three"]


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'model':10} {'rows':>5} {'experts':>7} {'three models':>13} {'routed':>7} {'dense':>6}")
    for name, shape in (("mlp", (1, 28, 28)), ("cnn-cifar", (3, 32, 32))):
        model = load_model(name, shape, 10)
        for rows in (32, 256):
            for count in (2, 3, 4, 10):
                three_s, routed, dense = ratios(model, rows, count)
                print(f"{name:10} {rows:5} {count:7} {1000 * three_s:10.2f} ms {routed:7.2f} {dense:6.2f}", flush=True)


if __name__ == "__main__":
    main()
