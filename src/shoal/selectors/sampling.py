"""Selection at random, by size or by score, and the checks that all selectors apply to their input."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.rng import derive_seed

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


def sample_uniformly(available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns k random clients. Every set of k available clients is equally likely."""
    present = available_indices(available)
    rng = np.random.default_rng(derive_seed(seed, "uniform"))
    return np.sort(rng.choice(present, size=num_selected(k, present), replace=False))


def sample_by_size(sizes: ArrayLike, available: ArrayLike, k: int, seed: int) -> Indices:
    """Returns k clients drawn one after the other, with probabilities proportional to the sizes of those not yet drawn.

    The draw uses independent exponential times with the sizes as rates: the k shortest times are exactly such a draw.
    Clients of size 0 have infinite times. They are drawn only if no others are left, all with equal probability.
    """
    size = validated_amounts("sizes", sizes)
    present = available_indices(available, len(size))
    unit_times = np.random.default_rng(derive_seed(seed, "by_size")).exponential(size=len(present))
    with np.errstate(divide="ignore", over="ignore"):
        order = np.lexsort((unit_times, unit_times / size[present]))
    return np.sort(present[order[: num_selected(k, present)]])


def select_largest(scores: ArrayLike, available: ArrayLike, k: int) -> Indices:
    """Returns the k clients with the highest scores.

    The lower index wins a tie, and clients without a score (NaN) come last.
    """
    score = validated_vector("scores", scores)
    present = available_indices(available, len(score))
    order = np.lexsort((present, -score[present]))  # NaN sorts last, whatever its sign
    return np.sort(present[order[: num_selected(k, present)]])


def available_indices(available: ArrayLike, total: int | None = None) -> Indices:
    """Returns the indices of the available clients in ascending order, from a mask or from indices in any order."""
    given = np.asarray(available)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "biu"):
        raise UserError(f"available is {available!r}; it must be a mask or a list of client indices")
    if given.dtype == bool:
        if total is not None and len(given) != total:
            raise UserError(f"available is a mask over {len(given)} clients; it must be over {total}")
        return np.flatnonzero(given).astype(np.int64)
    given = np.unique(given.astype(np.int64))
    if given.size and (given[0] < 0 or (total is not None and given[-1] >= total)):
        wrong = given[0] if given[0] < 0 else given[-1]
        raise UserError(f"available names client {wrong}; indices go from 0 to the number of clients less 1")
    return given


def num_selected(k: int, available: Indices) -> int:
    """Returns how many available clients are selected."""
    if k < 0:
        raise UserError(f"k is {k}; it must be 0 clients or more")
    return min(k, len(available))


def validated_vector(name: str, values: ArrayLike, total: int | None = None) -> Floats:
    """Returns an array with one number per client."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or (total is not None and len(vector) != total):
        expected = "one number per client" if total is None else f"one number for each of {total} clients"
        raise UserError(f"{name} has shape {vector.shape}; it must hold {expected}")
    return vector


def validated_amounts(name: str, values: ArrayLike, total: int | None = None) -> Floats:
    """Returns an array with one number per client, all finite and not negative."""
    amounts = validated_vector(name, values, total)
    bad = np.flatnonzero(~np.isfinite(amounts) | (amounts < 0))
    if bad.size:
        raise UserError(f"{name} has {amounts[bad[0]]} for client {bad[0]}; it must be finite and 0 or more")
    return amounts


def validated_matrix(name: str, values: ArrayLike, axes: str) -> Floats:
    """Returns a matrix, whose values need not be finite."""
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2:
        raise UserError(f"{name} has shape {matrix.shape}; it must be {axes}")
    return matrix
