"""How much each client contributes, from numbers that it tells of itself (APCSMA, Eq. 4 to 10, 14 and 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from shoal.selectors.sampling import Floats, validated_amounts, validated_vector

MIN_SHARE = 1e-6  # stands for a share of 0, whose logarithm is none (Eq. 6)


def shares(values: ArrayLike) -> Floats:
    """Each client's part of the whole (Eq. 5 and 9). Where there is no whole, all have the same part."""
    found = validated_amounts("values", values)
    total = found.sum()
    return found / total if total > 0 else np.full(len(found), 1 / max(1, len(found)))


def lognorm(values: ArrayLike) -> Floats:
    """The less of the whole a client has, the more it weighs: information -log2(share), as parts of 1 (Eq. 5 to 8).

    Negative numbers, which a cosine may be, count as 0. Where nobody says anything that others do not, as a single
    client or clients that are all alike, all weigh the same.
    """
    found = validated_vector("values", values).clip(min=0)
    information = -np.log2(np.where((part := shares(found)) > 0, part, MIN_SHARE))  # Eq. 6, 7
    total = information.sum()
    return information / total if total > 0 else np.full(len(information), 1 / max(1, len(information)))  # Eq. 8


def metrics(sizes: ArrayLike, counts: ArrayLike, accuracies: ArrayLike, losses: ArrayLike) -> Floats:
    """[clients, 4]: number of rows, rounds taken part in, accuracy and loss. Every column sums to 1."""
    return np.column_stack([shares(sizes), lognorm(counts), lognorm(accuracies), lognorm(losses)])


def cosines(rows: ArrayLike, reference: ArrayLike) -> Floats:
    """Of the angle between each row and one vector (Eq. 14), in double precision; 0 for a vector without length."""
    found, one = np.asarray(rows, dtype=np.float64), validated_vector("to", reference)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(one)
    return np.divide(found @ one, lengths, out=np.zeros(len(found)), where=lengths > 0).clip(-1, 1)


def with_directions(metric_columns: Floats, similarities: Sequence[ArrayLike]) -> Floats:
    """Columns for how much the parts of a client's model point where the global one does (Eq. 15)."""
    return np.column_stack([metric_columns, *(lognorm(s) for s in similarities)])
