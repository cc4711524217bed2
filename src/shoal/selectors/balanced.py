"""Selection of a cohort whose samples together have a flat label distribution.

The cohort grows by one client at a time. The first clients are those that have waited longest, whatever their labels.
Each further client is the one that makes the summed label counts s flattest, by Σ s_c² / (Σ s_c)². This concentration
is 1/C if all C classes are equally frequent and 1 if there is only one class. Ties are broken at random.

Flatness alone would never select some clients. With m longest-waiting clients in each round, a client that is always
present waits at most N / m rounds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.sampling import (
    Floats,
    Indices,
    available_indices,
    num_selected,
    validated_amounts,
    validated_matrix,
)

_TIE_TOLERANCE = 1e-12


def concentration(counts: ArrayLike) -> Floats:
    """Returns Σ s_c² / (Σ s_c)² along the last axis, and 1 if all counts are 0."""
    sums = np.asarray(counts, dtype=np.float64)
    total = sums.sum(-1)
    squares = np.square(sums).sum(-1)
    return np.divide(squares, np.square(total), out=np.ones_like(total), where=total > 0)


def longest_waiting_clients(
    counts: ArrayLike, last_rounds: ArrayLike, available: ArrayLike, k: int, waiting_fraction: float, seed: int
) -> Indices:
    """Returns the longest-waiting clients: the given fraction of a cohort of k clients, and at least one client."""
    label_counts, last = _validated_counts(counts), _validated_rounds(last_rounds)
    present = available_indices(available, len(label_counts))
    if not 0 <= waiting_fraction <= 1:
        raise UserError(f"waiting_fraction is {waiting_fraction}; it must be from 0 to 1")
    if len(last) != len(label_counts):
        raise UserError(f"last_rounds has {len(last)} entries; it must have {len(label_counts)}, as many as counts")
    with_samples, size = present[label_counts[present].sum(1) > 0], num_selected(k, present)
    num_waiting = min(size, max(1, math.ceil(waiting_fraction * size - _TIE_TOLERANCE)))
    return np.sort(
        with_samples[np.lexsort((_random_tie_breakers(label_counts, seed)[with_samples], last[with_samples]))][
            :num_waiting
        ]
    )


def fill_cohort(counts: ArrayLike, first_clients: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns the first clients and, until there are k, the available clients that make the label counts flattest.

    Clients without samples are selected only if no others are left.
    """
    label_counts, selected = _validated_counts(counts), np.asarray(first_clients, dtype=np.int64).tolist()
    present, tie_breakers = available_indices(available, len(label_counts)), _random_tie_breakers(label_counts, seed)
    with_samples, size = present[label_counts[present].sum(1) > 0], num_selected(k, present)
    remaining = [i for i in with_samples[np.argsort(tie_breakers[with_samples])].tolist() if i not in selected]
    total = label_counts[selected].sum(0)
    while remaining and len(selected) < size:
        concentrations = concentration(total + label_counts[remaining])
        best = remaining.pop(int(np.flatnonzero(concentrations <= concentrations.min() + _TIE_TOLERANCE)[0]))
        selected.append(best)
        total = total + label_counts[best]
    without_samples = present[label_counts[present].sum(1) == 0]
    selected += without_samples[np.argsort(tie_breakers[without_samples])].tolist()[: max(0, size - len(selected))]
    return np.sort(np.array(selected, dtype=np.int64))


def _random_tie_breakers(label_counts: Floats, seed: int) -> Floats:
    return np.random.default_rng(derive_seed(seed, "flattest")).random(len(label_counts))


def _validated_counts(counts: ArrayLike) -> Floats:
    matrix = validated_matrix("counts", counts, "clients x classes")
    validated_amounts("counts", matrix.ravel())
    return matrix


def _validated_rounds(last_rounds: ArrayLike) -> Floats:
    rounds = np.asarray(last_rounds, dtype=np.float64)
    if rounds.ndim != 1 or np.isnan(rounds).any():
        raise UserError(f"last_rounds has shape {rounds.shape}; it must hold one number per client")
    return rounds
