"""Metrics as pairs of sum and count, so that a mean over clients is never a mean of means by accident."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

SumAndCount = tuple[float, float]


def sum_pairs(pairs: Iterable[SumAndCount]) -> SumAndCount:
    """Returns the sum of the pairs."""
    total, count = 0.0, 0.0
    for s, n in pairs:
        total, count = total + s, count + n
    return total, count


def mean_of_pair(pair: SumAndCount) -> float | None:
    """Returns the mean, or None if the count is 0."""
    return pair[0] / pair[1] if pair[1] else None


def macro_f1(hits: Tensor, predicted: Tensor, actual: Tensor) -> float | None:
    """Returns the mean F1 over the classes that are present, or None if no class is.

    A class without samples in the test split has no F1. With 0 for it, a client would lose for a class that it does not
    have, and with 1 it would win.

    Parameters
    ----------
    hits, predicted, actual
        For each class, the number of correct predictions, of predictions, and of samples.
    """
    present = actual > 0
    if not bool(present.any()):
        return None
    f1 = 2 * hits / (predicted + actual).clamp(min=1)
    return float(f1[present].mean())


@dataclass(frozen=True)
class Score:
    """The evaluation of one client."""

    accuracy: float
    loss: float
    f1: float
    num_samples: int


@dataclass(frozen=True)
class FleetSummary:
    """The evaluation of all clients on their own test samples. Every client counts the same."""

    local: float  # mean accuracy
    std: float  # standard deviation of the accuracy
    worst10: float  # mean accuracy of the tenth of the clients with the lowest accuracy
    f1: float
    loss: float


def summarise_clients(scores: Sequence[Score]) -> FleetSummary | None:
    """Returns the summary of the clients' scores, or None if there are none."""
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
    """Returns the mean of a metric over all samples of the clients that reported it, or None if no client did."""
    return mean_of_pair(sum_pairs(m[name] for m in reports if name in m))
