"""Every clusterer passes scikit-learn's checks, except for those that are named here with the reason."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances
from sklearn.utils.estimator_checks import check_clustering, parametrize_with_checks

import shoal.clusterers
from shoal.clusterers import (
    AdaptiveDensityClusters,
    DecomposedClusters,
    FuzzyClusters,
    GreedyClusters,
    NeighbourClusters,
    OverlappingClusters,
    RepulsiveClusters,
    SimilarClusters,
)

ESTIMATORS = [
    AdaptiveDensityClusters(),
    AdaptiveDensityClusters(metric="precomputed"),
    DecomposedClusters(),
    FuzzyClusters(),
    GreedyClusters(),
    NeighbourClusters(),
    OverlappingClusters(),
    RepulsiveClusters(),
    SimilarClusters(),
]

# check_clustering is the only check that does not adapt its rows to the tags of an estimator; see below
NEGATIVE = {"check_clustering": "the check fits negative values, which the tag positive_only excludes"}
NOT_SQUARE = {"check_clustering": "the check fits vectors, but the tag pairwise asks for a square of similarities"}
EXPECTED = {
    "AdaptiveDensityClusters()": NEGATIVE,
    "AdaptiveDensityClusters(metric='precomputed')": NOT_SQUARE,
    "GreedyClusters()": NOT_SQUARE,
    "RepulsiveClusters()": {
        "check_clustering": "clusters are as mixed as possible, and the check asks for rows of one kind in each"
    },
    "SimilarClusters()": NEGATIVE,
}


def expected_failures(estimator):
    return EXPECTED.get(repr(estimator), {})


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures, xfail_strict=True)
def test_scikit_learn(estimator, check):
    check(estimator)


class OnOtherRows(ClusterMixin, BaseEstimator):
    """Clusters the result of a function of the rows."""

    def __init__(self, estimator, function):
        self.estimator = estimator
        self.function = function

    def fit(self, X, y=None):
        X = np.asarray(X)
        self.n_features_in_ = X.shape[1]
        self.labels_ = self.estimator.fit(self.function(X)).labels_
        return self


def shifted(X):
    return X - X.min()


@pytest.mark.parametrize(
    ("estimator", "function"),
    [
        (AdaptiveDensityClusters(), shifted),
        (AdaptiveDensityClusters(metric="precomputed"), euclidean_distances),
        (GreedyClusters(), cosine_similarity),
        (SimilarClusters(n_clusters=3), shifted),
    ],
    ids=["density", "precomputed", "greedy", "similar"],
)
def test_check_clustering_passes_with_rows_that_the_estimator_accepts(estimator, function):
    check_clustering("OnOtherRows", OnOtherRows(estimator, function))


def test_all_clusterers_are_checked():
    assert {type(e).__name__ for e in ESTIMATORS} == set(shoal.clusterers.__all__)


def test_every_expected_failure_names_a_checked_estimator():
    assert set(EXPECTED) <= {repr(e) for e in ESTIMATORS}
