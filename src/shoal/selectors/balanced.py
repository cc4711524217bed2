"""Choice of a cohort whose rows, taken together, hold all classes alike.

The cohort grows one client at a time: first those who have waited longest, then whoever makes the sum of all label
counts flattest, by Σ s_c² / (Σ s_c)², which is 1/C where all C classes are alike and 1 where there is one class only.
Equals are taken by chance. A choice by flatness alone never takes some clients. Those who have waited longest, a share
of the cohort, come first whatever they hold, and the others make up for them: with `first` of them in a round,
whoever is there waits N / first rounds at most.
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
    """Σ s_c² / (Σ s_c)² along the last axis; 1 where there is nothing."""
    s = np.asarray(counts, dtype=np.float64)
    total = s.sum(-1)
    squares = np.square(s).sum(-1)
    return np.divide(squares, np.square(total), out=np.ones_like(total), where=total > 0)


def longest_waiting_clients(
    counts: ArrayLike, last_rounds: ArrayLike, available: ArrayLike, k: int, waiting_fraction: float, seed: int
) -> Indices:
    """Of a cohort of k that `share` of it, one client at least, which is taken whatever it holds."""
    label_counts, since = _validated_counts(counts), _validated_rounds(last_rounds)
    there = available_indices(available, len(label_counts))
    if not 0 <= waiting_fraction <= 1:
        raise UserError(f"share is {waiting_fraction}; it must be from 0 to 1")
    if len(since) != len(label_counts):
        raise UserError(f"last has {len(since)} entries; it must have {len(label_counts)}, as many as counts")
    filled, size = there[label_counts[there].sum(1) > 0], num_selected(k, there)
    first = min(size, max(1, math.ceil(waiting_fraction * size - _TIE_TOLERANCE)))
    return np.sort(filled[np.lexsort((_random_tie_breakers(label_counts, seed)[filled], since[filled]))][:first])


def fill_cohort(counts: ArrayLike, first_clients: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Those who come first, and of others available whoever makes the sum flattest, until there are k."""
    label_counts, chosen = _validated_counts(counts), np.asarray(first_clients, dtype=np.int64).tolist()
    there, chance = available_indices(available, len(label_counts)), _random_tie_breakers(label_counts, seed)
    filled, size = there[label_counts[there].sum(1) > 0], num_selected(k, there)
    left = [i for i in filled[np.argsort(chance[filled])].tolist() if i not in chosen]
    total = label_counts[chosen].sum(0)
    while left and len(chosen) < size:
        spread = concentration(total + label_counts[left])
        best = left.pop(int(np.flatnonzero(spread <= spread.min() + _TIE_TOLERANCE)[0]))
        chosen.append(best)
        total = total + label_counts[best]
    empty = there[label_counts[there].sum(1) == 0]
    chosen += empty[np.argsort(chance[empty])].tolist()[: max(0, size - len(chosen))]
    return np.sort(np.array(chosen, dtype=np.int64))


def _random_tie_breakers(label_counts: Floats, seed: int) -> Floats:
    return np.random.default_rng(derive_seed(seed, "flattest")).random(len(label_counts))


def _validated_counts(counts: ArrayLike) -> Floats:
    held = validated_matrix("counts", counts, "clients x classes")
    validated_amounts("counts", held.ravel())
    return held


def _validated_rounds(last_rounds: ArrayLike) -> Floats:
    since = np.asarray(last_rounds, dtype=np.float64)
    if since.ndim != 1 or np.isnan(since).any():
        raise UserError(f"last has shape {since.shape}; it must hold one number per client")
    return since
