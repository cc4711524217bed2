"""DBSCAN with a radius that follows from the rows, in which noise joins the nearest cluster (FCE)."""

import numpy as np
import pytest
from sklearn.cluster import DBSCAN
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers import NeighbourClusters
from shoal.clusterers.neighbours import nearest_clusters
from shoal.errors import UserError


def planted(per=5, groups=3, width=40, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.normal(size=(groups, width)), per, axis=0)
    return rows + noise * rng.normal(size=rows.shape), np.repeat(np.arange(groups), per)


def test_by_hand():
    # distances of 0, 1, 6, 7, 9: 1 6 7 9 5 6 8 1 3 2, in order 1 1 2 3 5 6 6 7 8 9; nine tenths of the way from the
    # first to the last of ten is 8.1, half of it 4.05: 0-1, 6-7-9
    fitted = NeighbourClusters().fit([[0.0], [1.0], [6.0], [7.0], [9.0]])
    assert fitted.eps_ == pytest.approx(4.05)
    assert fitted.labels_.tolist() == [0, 0, 1, 1, 1]
    assert not fitted.noise_.any()


def test_noise_joins_the_cluster_with_the_smallest_mean_distance():
    # 0, 1 and 10, 11, 18: only the two pairs are within 0.3 of 17.1; the mean distance of 18 is 17.5 from the first
    # pair and 7.5 from the second
    fitted = NeighbourClusters(eps_factor=0.3).fit([[0.0], [1.0], [10.0], [11.0], [18.0]])
    assert fitted.noise_.tolist() == [False, False, False, False, True]
    assert fitted.labels_.tolist() == [0, 0, 1, 1, 1]
    # the mean decides, not the smallest distance: 4 is 3 from 1 and 4 from 8, but in the mean 28.5 from -50 and 1 and
    # 4.5 from 8 and 9
    assert nearest_clusters(np.array([[-50.0], [1.0], [8.0], [9.0]]), np.array([0, 0, 1, 1]), np.array([[4.0]])) == [1]


@pytest.mark.parametrize("sizes", [(12, 8), (13, 7), (15, 5), (14, 3, 3), (15, 3, 2), (10, 10)])
def test_planted_groups_may_have_unequal_sizes(sizes):
    """With 13 of 20 in one group most pairs are within it: a median would be a distance of that group."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(len(sizes), 40)), sizes, axis=0)
    rows = rows + 0.15 * rng.normal(size=rows.shape)
    assert adjusted_rand_score(np.repeat(np.arange(len(sizes)), sizes), NeighbourClusters().fit(rows).labels_) == 1


def test_without_a_dense_cluster_all_rows_are_one_cluster():
    fitted = NeighbourClusters(eps_factor=0.01).fit([[0.0], [1.0], [3.0], [7.0]])
    assert fitted.noise_.all()
    assert fitted.labels_.tolist() == [0, 0, 0, 0]


def test_agrees_with_scikit_learn():
    rows, truth = planted(noise=0.5)
    fitted = NeighbourClusters(eps_factor=0.6, min_samples=3).fit(rows)
    assert adjusted_rand_score(DBSCAN(eps=fitted.eps_, min_samples=3).fit(rows).labels_, fitted.labels_) == 1
    assert adjusted_rand_score(truth, fitted.labels_) == 1


def test_new_rows_join_the_cluster_with_the_smallest_mean_distance():
    fitted = NeighbourClusters().fit([[0.0], [1.0], [6.0], [7.0], [9.0]])
    # in the mean 3.8 is 3.3 from the first and 3.5 from the second, and 4.0 is 3.5 from the first and 3.3 from the
    # second
    assert fitted.predict([[3.8], [4.0]]).tolist() == [0, 1]
    assert fitted.predict(np.empty((0, 1))).shape == (0,)


def test_a_common_offset_of_rows_does_not_matter():
    """Last layers and their changes in training have the same distances."""
    rows, truth = planted()
    offset = NeighbourClusters().fit(rows - np.random.default_rng(1).normal(size=rows.shape[1]))
    assert (offset.labels_ == NeighbourClusters().fit(rows).labels_).all()
    assert adjusted_rand_score(truth, offset.labels_) == 1


@pytest.mark.parametrize("min_samples", [2, 4])
def test_partition_does_not_depend_on_the_order_of_rows(min_samples):
    rows = np.random.default_rng(1).normal(size=(30, 2))  # no structure: rows between clusters, and noise
    fitted = NeighbourClusters(0.15, min_samples=min_samples).fit(rows)
    assert 1 < fitted.labels_.max() + 1 < 30
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(30)
        again = NeighbourClusters(0.15, min_samples=min_samples).fit(rows[order])
        assert adjusted_rand_score(fitted.labels_[order], again.labels_) == 1
        assert (fitted.noise_[order] == again.noise_).all()


def test_labels_are_numbered_by_first_appearance_at_any_scale():
    rows, _ = planted()
    assert NeighbourClusters().fit(1e3 * rows[::-1]).labels_[[0, 5, 10]].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (np.ones((1, 4)), [0]),
        (np.ones((3, 4)), [0, 0, 0]),
        (np.array([[0.0], [0.0], [0.0], [0.0], [9.0]]), [0, 0, 0, 0, 0]),
        (np.array([[0.0], [1.0]]), [0, 0]),
    ],
    ids=["single", "equal", "most equal", "two"],
)
def test_degenerate(rows, labels):
    assert NeighbourClusters().fit(rows).labels_.tolist() == labels


def test_input_unmodified():
    rows, _ = planted()
    original = rows.copy()
    NeighbourClusters().fit(rows)
    assert (rows == original).all()


@pytest.mark.parametrize(
    ("keys", "rows", "sentence"),
    [
        ({"eps_factor": 0.0}, [[1.0]], "eps_factor is 0.0; it must be a finite number, above 0"),
        ({"min_samples": 0}, [[1.0]], "min_samples is 0; it must be a whole number, 1 or more"),
        ({}, [[np.nan]], "X has nan in row 0, column 0; entries must be finite, not NaN or infinite$"),
    ],
)
def test_bad_input(keys, rows, sentence):
    with pytest.raises(UserError, match=sentence):
        NeighbourClusters(**keys).fit(rows)
