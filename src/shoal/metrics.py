"""Metrics travel as (sum, count) pairs, so that a mean over clients is never a mean of means by accident."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

SumAndCount = tuple[float, float]


def sum_pairs(pairs: Iterable[SumAndCount]) -> SumAndCount:
    total, count = 0.0, 0.0
    for s, n in pairs:
        total, count = total + s, count + n
    return total, count


def mean_of_pair(pair: SumAndCount) -> float | None:
    return pair[0] / pair[1] if pair[1] else None


def macro_f1(hits: Tensor, predicted: Tensor, actual: Tensor) -> float | None:
    """Mean F1 over the classes that are present, from counts per class.

    A class that nobody holds in this test split has no F1: counting it as 0 would punish a client for
    what its data do not contain, counting it as 1 would reward it.
    """
    present = actual > 0
    if not bool(present.any()):
        return None
    f1 = 2 * hits / (predicted + actual).clamp(min=1)
    return float(f1[present].mean())


@dataclass(frozen=True)
class Score:
    """One client's evaluation."""

    accuracy: float
    loss: float
    f1: float
    num_samples: int


@dataclass(frozen=True)
class FleetSummary:
    """An evaluation of the whole fleet: what the clients are served on their own test data."""

    local: float
    std: float
    worst10: float
    f1: float
    loss: float


def summarise_clients(scores: Sequence[Score]) -> FleetSummary | None:
    """Every client counts the same, however much data it has; `worst10` is the mean of the worst tenth."""
    if not scores:
        return None
    accuracy = sorted(s.accuracy for s in scores)
    n = len(accuracy)
    mean = math.fsum(accuracy) / n
    worst = accuracy[: math.ceil(n / 10)]
    return FleetSummary(
        local=mean,
        std=math.sqrt(math.fsum((a - mean) ** 2 for a in accuracy) / n),
        worst10=math.fsum(worst) / len(worst),
        f1=math.fsum(s.f1 for s in scores) / n,
        loss=math.fsum(s.loss for s in scores) / n,
    )


def mean_over_clients(reports: Iterable[Mapping[str, SumAndCount]], name: str) -> float | None:
    """The mean of one metric over all examples of all clients that reported it."""
    return mean_of_pair(sum_pairs(m[name] for m in reports if name in m))
