"""FLIS: clients are similar if their models make similar predictions on the server's samples.

Morafah et al., "FLIS: Clustered Federated Learning via Inference Similarity for Non-IID Data Distribution", 2022,
arXiv 2208.09754.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shoal.clusterers.validation import Floats, Labels
from shoal.errors import UserError


def inference_similarity(predictions: ArrayLike) -> Floats:
    """Return the cosines between the predictions of models.

    Parameters
    ----------
    predictions : array-like of shape (n_models, n_samples) or (n_models, n_samples, n_classes)
        Classes as whole numbers, or one-hot rows or probabilities.

    Returns
    -------
    ndarray of shape (n_models, n_models)
        A_ij, the cosine of the one-hot predictions of i and j, which is the fraction of samples on which they agree.

    Raises
    ------
    UserError
        If `predictions` is not as described.

    References
    ----------
    Morafah et al., "FLIS: Clustered Federated Learning via Inference Similarity for Non-IID Data Distribution", 2022.

    Examples
    --------
    >>> inference_similarity([[0, 1, 2, 2], [0, 1, 1, 1]]).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    table = np.asarray(predictions)
    if table.ndim not in (2, 3) or table.shape[1] == 0 or (table.ndim == 2 and table.dtype.kind not in "iu"):
        raise UserError(
            f"predictions has shape {table.shape} of {table.dtype}; it must have whole class numbers of models by "
            "samples, or numbers of models by samples by classes"
        )
    if table.ndim == 2:
        agreement: Floats = np.zeros((len(table), len(table)))
        for c in np.unique(table):
            is_predicted = (table == c).astype(np.float64)
            agreement += is_predicted @ is_predicted.T
        agreement /= table.shape[1]
        return agreement
    flat = table.reshape(len(table), -1).astype(np.float64)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = np.divide(flat, length, out=np.zeros_like(flat), where=length > 0)
    similarity: Floats = unit @ unit.T
    np.fill_diagonal(similarity, 1.0)
    return similarity


def similarity_clusters(similarity: ArrayLike, threshold: float | None = None, n_clusters: int | None = None) -> Labels:
    """Cluster similarities by complete linkage.

    Parameters
    ----------
    similarity : array-like of shape (n_rows, n_rows)
        Symmetric similarities.
    threshold : float, optional
        The smallest similarity of two rows of one cluster.
    n_clusters : int, optional
        Number of clusters, at most as many as rows. Exactly one of `threshold` and `n_clusters` must be given.

    Returns
    -------
    ndarray of shape (n_rows,)
        The labels, numbered by first appearance.

    Raises
    ------
    UserError
        If an argument is not as described.

    Examples
    --------
    >>> similarity_clusters([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]], threshold=0.5).tolist()
    [0, 0, 1]
    """
    from scipy.cluster.hierarchy import cut_tree, fcluster, linkage
    from scipy.spatial.distance import squareform

    table = np.asarray(similarity, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not np.allclose(table, table.T):
        raise UserError(f"similarity has shape {table.shape}; it must be square and symmetric")
    if (threshold is None) == (n_clusters is None):
        raise UserError(f"threshold is {threshold} and n_clusters is {n_clusters}; exactly one must be given")
    if n_clusters is not None and n_clusters < 1:
        raise UserError(f"n_clusters is {n_clusters}; it must be 1 or more")
    if len(table) < 2:
        return np.zeros(len(table), dtype=np.int64)
    tree = linkage(squareform(1.0 - table, checks=False), method="complete")
    if threshold is not None:
        labels = fcluster(tree, t=1.0 - threshold, criterion="distance")
    else:
        labels = cut_tree(tree, n_clusters=min(n_clusters or 1, len(table)))[:, 0]
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
