"""What every clusterer checks about its input, and how it numbers its labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def one_thread() -> Any:
    """Products of a few rows are quick; threads that wait for each other on a busy machine make them far slower."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def table(X: ArrayLike, name: str = "X", least: float = 0.0, column: str = "class") -> Floats:
    """A copy of X as finite numbers, none below `least`: one row per client and one column per class."""
    try:
        found = np.array(X, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} holds something that is not a number ({error}); it must be a table of numbers"
        ) from error
    if found.ndim != 2 or found.shape[1] == 0:
        raise UserError(f"{name} has shape {found.shape}; it must have one row per client and one column per {column}")
    bad = np.argwhere(~np.isfinite(found) | (found < least))
    if len(bad):
        row, place = bad[0]
        value = found[row, place]
        bound = f" and {least:g} or more" if np.isfinite(least) else ""
        raise UserError(f"{name} has {value} in row {row}, column {place}; entries must be finite{bound}")
    return found + 0.0  # -0.0 and 0.0 are one value and must sort alike


def whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    return int(value)


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    return value


def by_first_appearance(labels: Labels) -> tuple[Labels, Labels]:
    """The same partition numbered 0, 1, ... in order of appearance, and the old number of each new one."""
    old, first, place = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return np.argsort(order)[place], old[order]


def as_before(labels: Labels, was: Labels, weights: ArrayLike = 1) -> Labels:
    """The same partition in the numbers of an earlier one: each cluster goes on with the number of one that it shares
    rows with, so that rows of the most weight keep theirs; what is new has numbers that were not there."""
    from scipy.optimize import linear_sum_assignment

    shared = np.zeros((labels.max(initial=-1) + 1, was.max(initial=-1) + 1), dtype=np.int64)
    np.add.at(shared, (labels, was), weights)
    new, old = linear_sum_assignment(shared, maximize=True)
    alike = shared[new, old] > 0
    numbers = np.full(len(shared), -1)
    numbers[new[alike]] = old[alike]
    fresh = numbers < 0
    numbers[fresh] = shared.shape[1] + np.arange(fresh.sum())
    return numbers[labels]
