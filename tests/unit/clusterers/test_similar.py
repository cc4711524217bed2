"""Clusters of similar label distributions."""

from math import log

import numpy as np
import pytest
from label_distributions import ONE_HOT, draw_label_distributions
from sklearn.exceptions import NotFittedError

from shoal.clusterers.similar import SimilarClusters
from shoal.clusterers.symmetric_kl import FLOOR, symmetric_kl
from shoal.errors import UserError


class TestSimilarClusters:
    def test_by_hand(self):
        # (.8 .2) and (.6 .4) are one cluster with centre (.7 .3), the other two mirror them; each of the four adds
        # ½ (.1 ln(8/7) - .1 ln(2/3)) = .05 ln(12/7) or ½ (-.1 ln(6/7) + .1 ln(4/3)) = .05 ln(14/9)
        rows = np.array([[0.8, 0.2], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]])
        fitted = SimilarClusters(2).fit(rows)
        assert fitted.labels_.tolist() == [0, 1, 0, 1]
        np.testing.assert_allclose(fitted.cluster_centers_, [[0.7, 0.3], [0.3, 0.7]])
        assert fitted.inertia_ == pytest.approx(2 * 0.05 * (log(12 / 7) + log(14 / 9)))

    def test_equal_rows_count_each(self):
        rows = np.array([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
        assert SimilarClusters(1).fit(rows).cluster_centers_[0].tolist() == pytest.approx([0.7, 0.3])

    def test_jeffreys_centre_has_the_smallest_sum_of_divergences(self):
        rows = draw_label_distributions(20, alpha=2.0)
        fitted = SimilarClusters(1, centre="jeffreys").fit(rows)
        assert fitted.inertia_ == pytest.approx(symmetric_kl(rows, fitted.cluster_centers_).sum())
        assert fitted.inertia_ < 0.99 * SimilarClusters(1).fit(rows).inertia_
        for entry in range(5):
            for factor in (0.99, 1.01):
                other = fitted.cluster_centers_.copy()
                other[0, entry] *= factor
                assert symmetric_kl(rows, other).sum() > fitted.inertia_

    def test_inertia_and_labels_belong_to_the_centres(self):
        rows = draw_label_distributions(60)
        fitted = SimilarClusters(4).fit(rows)
        assert fitted.predict(rows).tolist() == fitted.labels_.tolist()
        assert fitted.inertia_ == pytest.approx(symmetric_kl(rows, fitted.cluster_centers_).min(1).sum())
        np.testing.assert_allclose(fitted.cluster_centers_[2], np.maximum(rows[fitted.labels_ == 2], FLOOR).mean(0))

    def test_no_single_start_is_better(self):
        rows = draw_label_distributions(60)
        single = [SimilarClusters(6, random_state=seed, n_init=1).fit(rows).inertia_ for seed in range(10)]
        assert SimilarClusters(6, n_init=30).fit(rows).inertia_ <= min(single) + 1e-9
        assert max(single) > min(single) + 1e-3

    def test_fewer_distinct_rows_than_clusters(self):
        fitted = SimilarClusters(4).fit(np.eye(3)[[0, 2, 0, 1, 2]])
        assert fitted.labels_.tolist() == [0, 1, 0, 2, 1]
        assert fitted.inertia_ == 0
        assert len(SimilarClusters(4).fit(np.full((5, 3), 1 / 3)).cluster_centers_) == 1

    def test_as_many_clusters_as_distinct_rows(self):
        fitted = SimilarClusters(12, n_init=1).fit(draw_label_distributions(12))
        assert sorted(fitted.labels_) == list(range(12))
        assert fitted.inertia_ == pytest.approx(0)

    def test_a_centre_without_rows_gets_the_farthest_row(self):
        from shoal.clusterers.similar import _assign_rows

        rows = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
        unused = np.array([[0.9, 0.1], [0.01, 0.99], [1e-6, 1.0]])
        # nearest centres 0, 0 and 1; the third row is farther from its centre than the second, but alone there
        assert _assign_rows(rows, unused).tolist() == [0, 2, 1]

    def test_predict(self):
        fitted = SimilarClusters(2).fit(ONE_HOT[[0, 1]])
        assert fitted.predict([[0.1, 0.9, 0, 0], [0.9, 0.1, 0, 0]]).tolist() == [1, 0]
        assert fitted.predict(np.empty((0, 4))).shape == (0,)

    def test_bad_predictions(self):
        with pytest.raises(NotFittedError, match="SimilarClusters instance is not fitted yet"):
            SimilarClusters(2).predict(ONE_HOT)
        with pytest.raises(UserError, match="X has 2 features, but SimilarClusters is expecting 4 features as input"):
            SimilarClusters(2).fit(ONE_HOT).predict([[0.5, 0.5]])

    def test_iterations_are_counted_and_limited(self):
        rows = draw_label_distributions(60)
        unlimited = SimilarClusters(6, n_init=1).fit(rows)
        assert unlimited.n_iter_ > 2
        assert SimilarClusters(6, n_init=1, max_iter=2).fit(rows).n_iter_ == 2

    @pytest.mark.parametrize("bad", [{"n_init": 0}, {"max_iter": 0}, {"centre": "median"}])
    def test_bad_parameters(self, bad):
        (name,) = bad
        with pytest.raises(UserError, match=f"^{name} is "):
            SimilarClusters(2, **bad).fit(ONE_HOT)
