"""The contribution of each client, from metrics that it reports (APCSMA, Eq. 4 to 10, 14 and 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from shoal.selectors.sampling import Floats, validated_amounts, validated_vector

MIN_SHARE = 1e-6  # replaces a share of 0, which has no logarithm (Eq. 6)


def shares(values: ArrayLike) -> Floats:
    """Returns each value divided by the sum (Eq. 5 and 9), or equal shares if the sum is 0."""
    amounts = validated_amounts("values", values)
    total = amounts.sum()
    return amounts / total if total > 0 else np.full(len(amounts), 1 / max(1, len(amounts)))


def lognorm(values: ArrayLike) -> Floats:
    """Returns weights that are larger for smaller shares: the information -log2(share), scaled to a sum of 1 (Eq. 5-8).

    Negative values, which a cosine can have, count as 0. Weights are equal if the information is 0 for all clients, as
    for a single client.
    """
    amounts = validated_vector("values", values).clip(min=0)
    information = -np.log2(np.where((part := shares(amounts)) > 0, part, MIN_SHARE))  # Eq. 6, 7
    total = information.sum()
    return information / total if total > 0 else np.full(len(information), 1 / max(1, len(information)))  # Eq. 8


def metrics(sizes: ArrayLike, counts: ArrayLike, accuracies: ArrayLike, losses: ArrayLike) -> Floats:
    """Returns the metrics [clients, 4] from numbers of samples, participations, accuracy and loss.

    Every column sums to 1.
    """
    return np.column_stack([shares(sizes), lognorm(counts), lognorm(accuracies), lognorm(losses)])


def cosines(rows: ArrayLike, reference: ArrayLike) -> Floats:
    """Returns the cosine between each row and the reference (Eq. 14) in double precision, and 0 for a zero vector."""
    vectors, target = np.asarray(rows, dtype=np.float64), validated_vector("reference", reference)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(target)
    return np.divide(vectors @ target, lengths, out=np.zeros(len(vectors)), where=lengths > 0).clip(-1, 1)


def with_directions(metric_columns: Floats, similarities: Sequence[ArrayLike]) -> Floats:
    """Returns the metrics with a column for each set of cosines to the global model (Eq. 15)."""
    return np.column_stack([metric_columns, *(lognorm(s) for s in similarities)])
