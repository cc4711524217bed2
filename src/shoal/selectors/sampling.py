"""Choice by chance, by size or by score; and what every selector checks about its input."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


def sample_uniformly(available: ArrayLike, k: int, seed: int) -> Indices:
    """Every set of k clients is equally likely."""
    there = available_indices(available)
    rng = np.random.default_rng(derive_seed(seed, "uniform"))
    return np.sort(rng.choice(there, size=num_selected(k, there), replace=False))


def sample_by_size(sizes: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """One after the other, each time with probability proportional to size among those not yet chosen.

    Drawn as a race of exponential clocks whose rates are the sizes: the first k to ring are exactly such a draw.
    Clients of size 0 never ring; they are taken, all equally likely, only when nobody else is left.
    """
    size = validated_amounts("sizes", sizes)
    there = available_indices(available, len(size))
    wait = np.random.default_rng(derive_seed(seed, "by_size")).exponential(size=len(there))
    with np.errstate(divide="ignore", over="ignore"):
        order = np.lexsort((wait, wait / size[there]))
    return np.sort(there[order[: num_selected(k, there)]])


def select_largest(scores: ArrayLike, available: ArrayLike, k: int) -> Indices:
    """The highest scores; the lower index wins a tie; who has no score (NaN) comes after everybody who has one."""
    score = validated_vector("scores", scores)
    there = available_indices(available, len(score))
    order = np.lexsort((there, -score[there]))  # NaN sorts last, whatever its sign
    return np.sort(there[order[: num_selected(k, there)]])


def available_indices(available: ArrayLike, total: int | None = None) -> Indices:
    """The indices of those available in ascending order, from a mask or from indices in any order."""
    found = np.asarray(available)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "biu"):
        raise UserError(f"available is {available!r}; it must be a mask or a list of client indices")
    if found.dtype == bool:
        if total is not None and len(found) != total:
            raise UserError(f"available is a mask over {len(found)} clients; it must be over {total}")
        return np.flatnonzero(found).astype(np.int64)
    found = np.unique(found.astype(np.int64))
    if found.size and (found[0] < 0 or (total is not None and found[-1] >= total)):
        wrong = found[0] if found[0] < 0 else found[-1]
        raise UserError(f"available names client {wrong}; indices go from 0 to the number of clients less 1")
    return found


def num_selected(k: int, available: Indices) -> int:
    """How many of those available are chosen."""
    if k < 0:
        raise UserError(f"k is {k}; it must be 0 clients or more")
    return min(k, len(available))


def validated_vector(name: str, values: ArrayLike, total: int | None = None) -> Floats:
    """One number per client."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or (total is not None and len(found) != total):
        wanted = "one number per client" if total is None else f"one number for each of {total} clients"
        raise UserError(f"{name} has shape {found.shape}; it must hold {wanted}")
    return found


def validated_amounts(name: str, values: ArrayLike, total: int | None = None) -> Floats:
    """One number per client, finite and not negative."""
    found = validated_vector(name, values, total)
    bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if bad.size:
        raise UserError(f"{name} has {found[bad[0]]} for client {bad[0]}; it must be finite and 0 or more")
    return found


def validated_matrix(name: str, values: ArrayLike, axes: str) -> Floats:
    """A table of numbers, not necessarily finite."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 2:
        raise UserError(f"{name} has shape {found.shape}; it must be {axes}")
    return found
