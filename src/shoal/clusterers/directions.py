"""Principal components of rows of unit length, computed from the products of rows alone.

| paper | here |
|---|---|
| g_i, gradient of client i, divided by its length | a row of `rows`, divided by its length |
| V, principal components | never computed: with G = U Λ Uᵀ the products of rows, g V = U √Λ |
| z_i = g_i V, Eq. (2) | a row of `principal_directions(rows)` |

In Eq. (2) no mean is subtracted, which is also the default here. The usual principal components are those of rows
without their mean: `is_centred=True`. Rows with similar directions have cosines near 1 with their mean, and cosines of
any size without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.clusterers.validation import Floats, check_table, limit_blas_threads
from shoal.errors import UserError

_COLUMNS = 2**16  # columns of a wide table that are converted to double precision at once
_TIE = 1e-9  # a smaller relative difference of two entries may be rounding, so they count as equal


def principal_directions(rows: ArrayLike, explained_variance: float = 0.95, is_centred: bool = False) -> Floats:
    """Return the principal components of rows of unit length.

    The function needs less memory than a copy of `rows`.

    Parameters
    ----------
    rows : array-like of shape (n_rows, n_columns)
        Any finite numbers, such as updates of models. Each row is divided by its length; a row of zeros stays one.
    explained_variance : float, default=0.95
        Fraction of the sum of all eigenvalues that the components have together, above 0 and at most 1. An eigenvalue
        that may be rounding counts as 0, so 1 gives at most min(n_rows, n_columns) components, and one less if
        `is_centred`.
    is_centred : bool, default=False
        Whether the mean of the rows is subtracted first.

    Returns
    -------
    ndarray of shape (n_rows, n_components)
        As few components as reach `explained_variance`, at least 1, the largest first. The sign of a component is
        arbitrary; here its entry farthest from 0 is positive (the first of several).

    Raises
    ------
    UserError
        If `explained_variance` or `rows` is not as described.

    References
    ----------
    Li, Jia, Liu, Zhang, Wang, "SCMoE-PFL: a soft-clustering mixture-of-experts framework for personalized federated
    learning", 2026, Eq. (1) and (2).

    Examples
    --------
    >>> principal_directions([[3.0, 0.0], [1.0, 0.0], [0.0, 2.0]], explained_variance=1.0).round(6).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    if not 0 < explained_variance <= 1:
        raise UserError(f"explained_variance is {explained_variance}; it must be above 0 and at most 1")
    with limit_blas_threads():
        return _components(_products(_check_rows(rows)), explained_variance, is_centred)


def _components(products: Floats, explained_variance: float, is_centred: bool) -> Floats:
    rounding = len(products) * np.finfo(np.float64).eps * np.trace(products)
    if is_centred:
        products = products - products.mean(0) - products.mean(1)[:, None] + products.mean()
    values, vectors = (result[..., ::-1] for result in np.linalg.eigh(products))
    values = np.where(values > rounding, values, 0.0)
    sums = np.cumsum(values)
    num_components = 1 + np.count_nonzero(sums < explained_variance * sums[-1] - rounding)
    return _fix_signs(vectors[:, :num_components] * np.sqrt(values[:num_components]))  # Eq. (2)


def _check_rows(rows: ArrayLike) -> NDArray[Any]:
    table = np.asarray(rows) if hasattr(rows, "__array__") else check_table(rows, "rows")
    if table.dtype.kind not in "biuf":
        raise UserError(f"rows has entries of type {table.dtype}; it must be a table of numbers")
    if table.ndim != 2 or 0 in table.shape:
        raise UserError(f"rows has shape {table.shape}; it must have one row or more and one column or more")
    return table


def _products(rows: NDArray[Any]) -> Floats:
    """Returns the cosines of all pairs of rows; 0 for a row of zeros.

    Each row is divided by its largest entry first, so that squares neither overflow nor vanish in any unit.
    """
    blocks = [slice(start, start + _COLUMNS) for start in range(0, rows.shape[1], _COLUMNS)]
    largest, products = np.zeros(len(rows)), np.zeros((len(rows), len(rows)))
    for block in blocks:
        largest = np.maximum(largest, np.abs(rows[:, block].astype(np.float64)).max(1))
    _refuse_infinite(rows, largest)
    unit = np.where(largest > 0, largest, 1.0)[:, None]
    for block in blocks:
        part = rows[:, block] / unit
        products += part @ part.T
    lengths = np.sqrt(np.where(largest > 0, np.diag(products), 1.0))
    cosines: Floats = products / lengths / lengths[:, None]
    return cosines


def _refuse_infinite(rows: NDArray[Any], largest: Floats) -> None:
    for row in np.flatnonzero(~np.isfinite(largest))[:1]:
        column = np.flatnonzero(~np.isfinite(rows[row]))[0]
        raise UserError(
            f"rows has {rows[row, column]} in row {row}, column {column}; entries must be finite, not NaN or infinite"
        )


def _fix_signs(components: Floats) -> Floats:
    sizes = np.abs(components)
    farthest = (sizes >= (1 - _TIE) * sizes.max(0)).argmax(0)
    signs = np.where(components[farthest, np.arange(components.shape[1])] < 0, -1.0, 1.0)
    signed: Floats = components * signs + 0.0  # without negative zeros
    return signed
