"""What holds for both clusterers of label distributions in all variants."""

import numpy as np
import pytest
from label_distributions import ONE_HOT, clusters_as_values, draw_label_distributions
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers.repulsive import RepulsiveClusters
from shoal.clusterers.similar import SimilarClusters
from shoal.errors import UserError

BOTH = pytest.mark.parametrize(
    "make",
    [
        lambda n=3, seed=0: SimilarClusters(n, random_state=seed),
        lambda n=3, seed=0: SimilarClusters(n, random_state=seed, centre="jeffreys"),
        lambda n=3, seed=0: RepulsiveClusters(n, random_state=seed),
        lambda n=3, seed=0: RepulsiveClusters(n, random_state=seed, swaps="all"),
    ],
    ids=["similar", "jeffreys", "repulsive", "repulsive-all"],
)


@BOTH
class TestEveryClusterer:
    @pytest.mark.parametrize(
        "rows",
        [draw_label_distributions(23), ONE_HOT, draw_label_distributions(12).round(1)],
        ids=["drawn", "one-hot", "ties"],
    )
    def test_partition_does_not_depend_on_the_order(self, make, rows):
        partition = clusters_as_values(rows, make().fit(rows).labels_)
        for seed in range(5):
            shuffled = np.random.default_rng(seed).permutation(rows)
            assert clusters_as_values(shuffled, make().fit(shuffled).labels_) == partition

    def test_distinct_rows_are_permuted_with_their_labels(self, make):
        rows, order = draw_label_distributions(23), np.random.default_rng(5).permutation(23)
        reordered = make().fit(rows[order]).labels_
        assert adjusted_rand_score(make().fit(rows).labels_[order], reordered) == 1

    def test_labels_are_numbered_by_first_appearance(self, make):
        labels = make(4).fit(draw_label_distributions(30)).labels_
        _, first = np.unique(labels, return_index=True)
        assert labels[np.sort(first)].tolist() == [0, 1, 2, 3]

    def test_single_row(self, make):
        assert make().fit(draw_label_distributions(1)).labels_.tolist() == [0]

    def test_more_clusters_than_rows(self, make):
        assert make(9).fit(draw_label_distributions(4)).labels_.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "rows", [np.zeros((6, 4)), ONE_HOT, np.ones((6, 1))], ids=["zeros", "one-hot", "one class"]
    )
    def test_degenerate_rows(self, make, rows):
        labels = make(2).fit(rows).labels_
        assert labels.shape == (len(rows),)
        assert set(labels) <= {0, 1}

    def test_input_unmodified_and_any_sequence(self, make):
        rows = draw_label_distributions(12).round(1)
        original = rows.copy()
        labels = make().fit(rows).labels_
        assert (rows == original).all()
        assert make().fit(rows.tolist()).labels_.tolist() == labels.tolist()

    def test_same_seed_same_result(self, make):
        rows = draw_label_distributions(40)
        assert make().fit(rows).labels_.tolist() == make().fit(rows).labels_.tolist()
        assert make(seed=np.int64(3)).fit(rows).labels_.tolist() == make(seed=3).fit(rows).labels_.tolist()

    @pytest.mark.parametrize("count", [0, -1, 2.5, True])
    def test_bad_count(self, make, count):
        with pytest.raises(UserError, match=rf"^n_clusters is {count}; it must be a whole number, 1 or more$"):
            make(count).fit(draw_label_distributions(5))

    @pytest.mark.parametrize(
        ("rows", "sentence"),
        [
            ([[0.5, np.nan]], r"X has nan in row 0, column 1; entries must be finite, not NaN or infinite"),
            ([[0.5, 0.5], [np.inf, 0]], r"X has inf in row 1, column 0; entries must be finite, not NaN or infinite"),
            ([[1.5, -0.5]], r"X has -0.5 in row 0, column 1; entries must be 0 or more"),
            ([0.5, 0.5], r"X has shape \(2,\); it must have two axes, rows and columns"),
            (np.zeros((3, 0)), r"X has 0 feature\(s\) \(shape=\(3, 0\)\) while a minimum of 1 is required"),
            (np.zeros((0, 3)), r"X has 0 sample\(s\) \(shape=\(0, 3\)\) while a minimum of 1 is required"),
            ([["a", "b"]], r"X has an entry that is not a number"),
            ([[0.5, 0.5], [1.0]], r"X has an entry that is not a number"),
            ([[0.5, 1j]], r"X has complex numbers; they must be real"),
        ],
    )
    def test_bad_rows(self, make, rows, sentence):
        with pytest.raises(UserError, match=sentence):
            make().fit(rows)

    @pytest.mark.parametrize("seed", [-1, 0.5, "x"])
    def test_bad_seed(self, make, seed):
        with pytest.raises(UserError, match=f"^random_state is {seed!r}; it must be a whole number, 0 or more$"):
            make(seed=seed).fit(draw_label_distributions(5))

    def test_a_generator_is_a_seed_too(self, make):
        first, again = (make(seed=np.random.RandomState(3)).fit(draw_label_distributions(40)) for _ in range(2))
        assert first.labels_.tolist() == again.labels_.tolist()
        assert make(seed=None).fit(draw_label_distributions(40)).labels_.shape == (40,)
