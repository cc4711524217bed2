"""The modified Jensen-Shannon divergence (MJS) of FedEPC between sparsity vectors.

Tang et al., "FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
fusion scenarios", Computers, Materials & Continua, 2025 (doi:10.32604/cmc.2025.066241), Eq. (3) and (4).

| paper | here |
|---|---|
| s^(i) | a row of `S`, not negative; the paper's lie in [0, 1] |
| P, Q | the rows divided by their sums; a row of zeros stays a row of zeros |
| JS(s, t), Eq. (4) | the same formula without normalisation: not bounded, and twice as large for rows twice as large |
| γ | `gamma` |
| MJS, Eq. (3) | `modified_js`, `pairwise_modified_js`, `paired_modified_js` |

With h(x) = x ln x, 0 for x = 0, Eq. (4) is Σ_c [(h(s_c) + h(t_c)) / 2 - h((s_c + t_c) / 2)]. The first two terms belong
to one row each, so each pair and entry needs only one logarithm. Both parts of Eq. (3) have this form. They are one
sum over 2C columns: those of P and Q with weight 1, those of s and t with weight γ.

Each column is divided by its mean and weighted with it. This does not change the result, because JS is homogeneous in
every entry. But entries are then near 1 and h is near 0, so little precision is lost by cancellation, and single
precision is enough for similar rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.clusterers.validation import Floats

Matrix = NDArray[np.floating[Any]]

_TILE = 256  # rows and columns of distances computed at once, so that they fit into a processor's cache
_SMALLEST_ENTRY = 1e-30  # replaces 0, because x ln x is then finite, and 0 in any precision


def modified_js(P: Matrix, Q: Matrix, gamma: float = 1.0) -> Floats:
    """Return the modified Jensen-Shannon divergence of all pairs of rows of two tables.

    Parameters
    ----------
    P : ndarray of shape (n_p, n_columns)
        Non-negative numbers.
    Q : ndarray of shape (n_q, n_columns)
        The same.
    gamma : float, default=1.0
        Weight of the part that is not normalised.

    Returns
    -------
    ndarray of shape (n_p, n_q)
        The divergences.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (3).

    Examples
    --------
    >>> modified_js(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5], [1.0, 0.0]])).round(4).tolist()
    [[0.4315, 0.0]]
    """
    divergences = np.empty((len(P), len(Q)))
    entries, weights = _entries(np.concatenate([P, Q]), gamma, np.float64)
    for rows in _tiles(0, len(P)):
        for columns in _tiles(len(P), len(P) + len(Q)):
            columns_of_q = slice(columns.start - len(P), columns.stop - len(P))
            divergences[rows, columns_of_q] = _tile(entries[:, rows], entries[:, columns], weights)
    return divergences


def pairwise_modified_js(S: Matrix, gamma: float = 1.0, dtype: type[np.floating[Any]] = np.float64) -> Matrix:
    """Return the modified Jensen-Shannon divergence of all pairs of rows of one table.

    The result is the only array of its size in memory.

    Parameters
    ----------
    S : ndarray of shape (n_rows, n_columns)
        Non-negative numbers.
    gamma : float, default=1.0
        Weight of the part that is not normalised.
    dtype : type, default=numpy.float64
        Precision of the result.

    Returns
    -------
    ndarray of shape (n_rows, n_rows)
        The divergences, symmetric and with zeros on the diagonal.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (3).
    """
    divergences = np.empty((len(S), len(S)), dtype)
    entries, weights = _entries(S, gamma, dtype)
    for rows in _tiles(0, len(S)):
        for columns in _tiles(rows.start, len(S)):
            divergences[rows, columns] = _tile(entries[:, rows], entries[:, columns], weights)
            divergences[columns, rows] = divergences[rows, columns].T
    return divergences


def paired_modified_js(P: Matrix, Q: Matrix, gamma: float = 1.0) -> Floats:
    """Return the modified Jensen-Shannon divergence of each row of a table and the same row of another.

    Parameters
    ----------
    P : ndarray of shape (n_rows, n_columns)
        Non-negative numbers.
    Q : ndarray of shape (n_rows, n_columns)
        The same.
    gamma : float, default=1.0
        Weight of the part that is not normalised.

    Returns
    -------
    ndarray of shape (n_rows,)
        The divergences.

    References
    ----------
    Tang et al., "FedEPC", 2025, Eq. (3).
    """
    from scipy.special import rel_entr

    total = np.zeros(len(P))
    for weight, p, q in ((1.0, normalise_rows(P), normalise_rows(Q)), (gamma, P, Q)):
        middle = (p + q) / 2
        total += weight * (rel_entr(p, middle) + rel_entr(q, middle)).sum(1) / 2
    return np.maximum(total, 0.0)


def normalise_rows(rows: Matrix) -> Matrix:
    """Return rows divided by their sums.

    Parameters
    ----------
    rows : ndarray of shape (n_rows, n_columns)
        Non-negative numbers.

    Returns
    -------
    ndarray of shape (n_rows, n_columns)
        Rows that sum to 1. A row of zeros stays a row of zeros.
    """
    sums = rows.sum(1, keepdims=True)
    return rows / np.where(sums > 0, sums, 1.0)


def _entries(rows: Matrix, gamma: float, dtype: type[np.floating[Any]]) -> tuple[Tensor, list[float]]:
    """Returns the entries [columns, rows] and the weight of each column.

    Columns of zeros and columns without weight contribute nothing and are left out.
    """
    both = np.concatenate([normalise_rows(rows), rows], axis=1)
    weights = np.repeat([1.0, gamma], rows.shape[1])
    means = both.mean(0) if len(both) else np.zeros(len(weights))
    used = (means > 0) & (weights > 0)
    scaled = np.maximum(both[:, used] / means[used], _SMALLEST_ENTRY).T
    return torch.from_numpy(np.ascontiguousarray(scaled, dtype)), (weights * means)[used].tolist()


def _tiles(start: int, stop: int) -> list[slice]:
    return [slice(first, min(first + _TILE, stop)) for first in range(start, stop, _TILE)]


def _tile(left: Tensor, right: Tensor, weights: list[float]) -> NDArray[Any]:
    """Returns Eq. (3) between the columns of `left` and of `right`. Each column has the entries of one row."""
    total = left.new_zeros(left.shape[1], right.shape[1])
    left_h, right_h = left * left.log() / 2, right * right.log() / 2
    for a, b, a_h, b_h, weight in zip(left / 2, right / 2, left_h, right_h, weights, strict=True):
        middle = a[:, None] + b
        term = a_h[:, None] + b_h
        term -= middle.log().mul_(middle)  # not fused with the product, because equal entries must give exactly 0
        total.add_(term, alpha=weight)
    return total.clamp_(min=0).numpy()
