"""The symmetric Kullback-Leibler divergence."""

from math import log

import numpy as np
import pytest
from label_distributions import ONE_HOT, draw_label_distributions, reference_symmetric_kl

from shoal.clusterers.symmetric_kl import symmetric_kl


class TestDivergence:
    def test_by_hand(self):
        # ½ [(3/4 ln 3 + 1/4 ln 1/3) + (1/4 ln 1/3 + 3/4 ln 3)] = ½ ln 3 for (3/4, 1/4) and (1/4, 3/4);
        # against (1/2, 1/2): ½ [1/4 ln(3/2) - 1/4 ln(1/2)] = ln(3)/8
        p = np.array([[0.75, 0.25]])
        divergences = symmetric_kl(p, np.array([[0.25, 0.75], [0.5, 0.5], [0.75, 0.25]]))
        assert divergences[0].tolist() == pytest.approx([log(3) / 2, log(3) / 8, 0.0])

    def test_floor_is_not_normalised_away(self):
        # one-hot rows: two entries differ, each adds ½ (1 - 1e-6) ln 1e6
        divergences = symmetric_kl(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))
        assert divergences.item() == pytest.approx((1 - 1e-6) * log(1e6), rel=1e-12)

    def test_entries_below_the_floor_count_as_the_floor(self):
        assert symmetric_kl(np.array([[1.0, 1e-9]]), np.array([[1.0, 0.0]])).item() == 0

    def test_agrees_with_the_definition(self):
        p, q = draw_label_distributions(6), draw_label_distributions(4, seed=1)
        expected = [[reference_symmetric_kl(a, b) for b in q] for a in p]
        np.testing.assert_allclose(symmetric_kl(p, q), expected, atol=1e-12)

    @pytest.mark.parametrize("rows", [draw_label_distributions(40), ONE_HOT, np.zeros((3, 4)), np.full((3, 7), 1 / 7)])
    def test_zero_to_itself_symmetric_never_negative(self, rows):
        d = symmetric_kl(rows, rows)
        assert (np.diag(d) == 0).all()
        assert (d >= 0).all()
        np.testing.assert_allclose(d, d.T, atol=1e-12)
