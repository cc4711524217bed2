"""Checks of the input of clusterers, and the numbering of labels.

Importing this module does not load scikit-learn, because stages import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
RandomState = int | np.random.RandomState | None


class NotNumeric(UserError, TypeError):
    """The input is no dense table of numbers. This is also a TypeError, which scikit-learn expects in this case."""


def limit_blas_threads() -> Any:
    """Limit BLAS to one thread within a `with` block.

    On a busy machine, threads that wait for each other make products of a few rows much slower.

    Returns
    -------
    context manager
        The limit of `threadpoolctl`.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def check_table(X: ArrayLike, name: str = "X", non_negative: bool = False, min_rows: int = 0) -> Floats:
    """Return a copy of a table as finite numbers.

    Parameters
    ----------
    X : array-like of shape (n_rows, n_columns)
        Lists, an array, a data frame or a tensor on the CPU.
    name : str, default="X"
        Name of the argument, for error messages.
    non_negative : bool, default=False
        Whether negative entries raise an error.
    min_rows : int, default=0
        Number of rows that the table must have at least.

    Returns
    -------
    ndarray of shape (n_rows, n_columns)
        The entries in double precision, without negative zeros, which would sort differently from zeros.

    Raises
    ------
    UserError
        If the shape is wrong, an entry is not a finite number, or an entry is negative and `non_negative` is True.
    """
    rows = to_floats(X, name)
    check_shape(rows.shape, name, min_rows)
    _refuse_bad_entries(rows, name, non_negative)
    return rows + 0.0


def to_floats(X: ArrayLike, name: str = "X") -> Floats:
    """Return a copy of array-like input of any shape in double precision.

    Parameters
    ----------
    X : array-like
        The input.
    name : str, default="X"
        Name of the argument, for error messages.

    Returns
    -------
    ndarray
        The copy.

    Raises
    ------
    UserError
        If the input is sparse or complex, or an entry is not a number.
    """
    if hasattr(X, "toarray"):
        raise NotNumeric(f"{name} is a sparse {type(X).__name__}; it must be dense, such as {name}.toarray()")
    try:
        is_complex = np.iscomplexobj(X)
        rows = np.array(X if not is_complex else 0, dtype=np.float64)
    except (TypeError, ValueError) as error:
        message = f"{name} has an entry that is not a number ({error}); it must be a table of numbers"
        raise NotNumeric(message) from error
    if is_complex:
        raise UserError(f"Complex data not supported: {name} has complex numbers; they must be real")
    return rows


def check_shape(shape: tuple[int, ...], name: str, min_rows: int) -> None:
    """Raise an error if a shape is not (`min_rows` or more, 1 or more).

    Parameters
    ----------
    shape : tuple of int
        Shape of the argument.
    name : str
        Name of the argument, for the error message.
    min_rows : int
        Number of rows that the argument must have at least.

    Raises
    ------
    UserError
        If there are not two axes, or too few rows or columns.
    """
    if len(shape) != 2:
        raise UserError(
            f"{name} has shape {shape}; it must have two axes, rows and columns. Reshape your data, for example with "
            f"{name}.reshape(1, -1) if it is a single row"
        )
    for axis, count, minimum in (("feature", shape[1], 1), ("sample", shape[0], min_rows)):
        if count < minimum:
            raise UserError(f"{name} has {count} {axis}(s) (shape={shape}) while a minimum of {minimum} is required.")


def _refuse_bad_entries(rows: Floats, name: str, non_negative: bool) -> None:
    for row, column in np.argwhere(~np.isfinite(rows))[:1]:
        raise UserError(
            f"{name} has {rows[row, column]} in row {row}, column {column}; entries must be finite, not NaN or infinite"
        )
    if non_negative:
        for row, column in np.argwhere(rows < 0)[:1]:
            raise UserError(
                f"Negative values in data: {name} has {rows[row, column]} in row {row}, column {column}; entries must "
                "be 0 or more"
            )


def check_fit_rows(estimator: Any, X: ArrayLike, non_negative: bool = False) -> Floats:
    """Return the rows given to `fit` as finite numbers, and record their number of columns.

    Parameters
    ----------
    estimator : estimator
        Receives `n_features_in_`, and `feature_names_in_` if `X` is a data frame.
    X : array-like of shape (n_rows, n_columns)
        The argument of `fit`.
    non_negative : bool, default=False
        Whether negative entries raise an error.

    Returns
    -------
    ndarray of shape (n_rows, n_columns)
        A copy in double precision.

    Raises
    ------
    UserError
        If the rows are not as required; see `check_table`.
    """
    rows = check_table(X, "X", non_negative, min_rows=1)
    check_features(estimator, X, reset=True)
    return rows


def check_new_rows(estimator: Any, X: ArrayLike, non_negative: bool = False) -> Floats:
    """Return the rows given to `predict` as finite numbers. The table may be empty.

    Parameters
    ----------
    estimator : estimator
        A fitted estimator.
    X : array-like of shape (n_rows, n_columns)
        The argument of `predict`, with as many columns as in `fit`.
    non_negative : bool, default=False
        Whether negative entries raise an error.

    Returns
    -------
    ndarray of shape (n_rows, n_columns)
        A copy in double precision.

    Raises
    ------
    sklearn.exceptions.NotFittedError
        If `fit` was not called.
    UserError
        If the rows are not as required; see `check_table`.
    """
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    rows = check_table(X, "X", non_negative)
    check_features(estimator, X, reset=False)
    return rows


def check_features(estimator: Any, X: ArrayLike, reset: bool) -> None:
    """Record the columns of `X` in the estimator, or compare them with the recorded ones.

    Parameters
    ----------
    estimator : estimator
        Has or receives `n_features_in_`.
    X : array-like of shape (n_rows, n_columns)
        Rows that have been checked.
    reset : bool
        True in `fit`, False in `predict`.

    Raises
    ------
    UserError
        If `reset` is False and the columns are not those of `fit`.
    """
    from sklearn.utils.validation import validate_data

    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def seed_from(random_state: RandomState) -> int:
    """Return the seed that follows from the parameter `random_state`.

    Parameters
    ----------
    random_state : int, RandomState or None
        A whole number, 0 or more, is the seed itself. Otherwise the seed is drawn from the given generator, or for None
        from NumPy's global generator.

    Returns
    -------
    int
        The seed.

    Raises
    ------
    UserError
        If `random_state` has another type or is negative.
    """
    if random_state is None or isinstance(random_state, np.random.RandomState):
        from sklearn.utils import check_random_state

        return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
    return check_whole_number("random_state", random_state, 0)


def check_whole_number(name: str, value: object, minimum: int) -> int:
    """Return a parameter that must be a whole number.

    Parameters
    ----------
    name : str
        Name of the parameter, for the error message.
    value : object
        Its value.
    minimum : int
        The smallest value that is allowed.

    Returns
    -------
    int
        The value.

    Raises
    ------
    UserError
        If the value is not a whole number or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise UserError(f"{name} is {value!r}; it must be a whole number, {minimum} or more")
    return int(value)


def check_number(name: str, value: object, minimum: float, is_exclusive: bool = False) -> float:
    """Return a parameter that must be a finite number.

    Parameters
    ----------
    name : str
        Name of the parameter, for the error message.
    value : object
        Its value.
    minimum : float
        The lower bound.
    is_exclusive : bool, default=False
        Whether the value must be above the bound, not only at least as large.

    Returns
    -------
    float
        The value.

    Raises
    ------
    UserError
        If the value is not a finite number or is too small.
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))
    if not is_number or value < minimum or (is_exclusive and value == minimum):  # type: ignore[operator]
        bound = f", above {minimum:g}" if is_exclusive else f", {minimum:g} or more" if np.isfinite(minimum) else ""
        raise UserError(f"{name} is {value!r}; it must be a finite number{bound}")
    return float(value)  # type: ignore[arg-type]


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return a parameter that must be one of several words.

    Parameters
    ----------
    name : str
        Name of the parameter, for the error message.
    value : str
        Its value.
    allowed : tuple of str
        The values that are allowed.

    Returns
    -------
    str
        The value.

    Raises
    ------
    UserError
        If the value is not allowed.
    """
    if not isinstance(value, str) or value not in allowed:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def order_by_value(rows: Floats) -> Labels:
    """Return an order of rows that follows from their values and not from their positions.

    Rounding errors in the last bits of a row do not move it to another place, because the most significant bytes of
    each number are compared first.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Any finite numbers.

    Returns
    -------
    ndarray of shape (n_rows,)
        The indices of the rows in their order.
    """
    keys = [row.astype(">f8").tobytes() for row in rows]
    return np.array(sorted(range(len(rows)), key=keys.__getitem__), dtype=np.int64)


def number_by_first_appearance(labels: Labels) -> tuple[Labels, Labels]:
    """Number the clusters of a partition in the order in which they first appear.

    Parameters
    ----------
    labels : ndarray of shape (n_rows,)
        A number for each row; rows of one cluster have the same.

    Returns
    -------
    labels : ndarray of shape (n_rows,)
        The same partition, numbered 0, 1, ...
    old : ndarray of shape (n_clusters,)
        The number that each cluster had before.

    Examples
    --------
    >>> labels, old = number_by_first_appearance(np.array([7, 2, 7]))
    >>> labels.tolist(), old.tolist()
    ([0, 1, 0], [7, 2])
    """
    old, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return np.argsort(order)[inverse], old[order]


def match_labels(labels: Labels, previous_labels: Labels, weights: ArrayLike = 1) -> Labels:
    """Give the clusters of a partition the numbers of an earlier partition of the same rows.

    Clusters are matched one to one, such that as many rows as possible keep their number.

    Parameters
    ----------
    labels : ndarray of shape (n_rows,)
        The present partition.
    previous_labels : ndarray of shape (n_rows,)
        The earlier partition.
    weights : int or ndarray of shape (n_rows,), default=1
        How much each row counts.

    Returns
    -------
    ndarray of shape (n_rows,)
        The partition of `labels`. A cluster that shares no row with an earlier cluster has a number that
        `previous_labels` does not have.

    Examples
    --------
    >>> match_labels(np.array([0, 0, 1, 2]), np.array([5, 5, 3, 5])).tolist()
    [5, 5, 3, 6]
    """
    from scipy.optimize import linear_sum_assignment

    shared = np.zeros((labels.max(initial=-1) + 1, previous_labels.max(initial=-1) + 1), dtype=np.int64)
    np.add.at(shared, (labels, previous_labels), weights)
    new, old = linear_sum_assignment(shared, maximize=True)
    is_matched = shared[new, old] > 0
    numbers = np.full(len(shared), -1)
    numbers[new[is_matched]] = old[is_matched]
    is_new = numbers < 0
    numbers[is_new] = shared.shape[1] + np.arange(is_new.sum())
    return numbers[labels]
