from __future__ import annotations

import math

import pytest
import torch

from shoal.data import heterogeneity_metrics


def test_disjoint_clients_are_at_distance_one() -> None:
    f = heterogeneity_metrics(torch.tensor([[10, 0], [0, 30]]))
    assert f["js_distance"] == pytest.approx(1.0)
    assert f["class_imbalance"] == pytest.approx(1.0)
    assert (f["num_clients"], f["num_samples"], f["min_samples"], f["median_samples"], f["max_samples"]) == (
        2,
        40,
        10,
        20,
        30,
    )


def test_equal_clients_are_at_distance_zero() -> None:
    f = heterogeneity_metrics(torch.tensor([[5, 5], [20, 20], [1, 1]]))
    assert f["js_distance"] == 0
    assert f["class_imbalance"] == pytest.approx(0.0)


def test_distance_by_hand() -> None:
    """p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4): JSD = H(m) - H(q) / 2 with H(q) = 1 bit, H(p) = 0."""
    h_m = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    f = heterogeneity_metrics(torch.tensor([[8, 0], [3, 3]]))
    assert f["js_distance"] == pytest.approx(math.sqrt(h_m - 0.5))
    assert f["class_imbalance"] == pytest.approx(0.5)


def test_distance_is_the_mean_over_pairs() -> None:
    """Two alike and one apart: distances 0, 1, 1."""
    assert heterogeneity_metrics(torch.tensor([[1, 0], [2, 0], [0, 1]]))["js_distance"] == pytest.approx(2 / 3)


def test_gini_by_hand() -> None:
    """Sizes 1, 2, 3, 4: sum of (2i - n - 1) x_i = -3 - 2 + 3 + 12 = 10, over n * 10 = 40."""
    assert heterogeneity_metrics(torch.tensor([[4, 0], [0, 1], [3, 0], [0, 2]]))["size_gini"] == pytest.approx(0.25)
    assert heterogeneity_metrics(torch.tensor([[7, 0], [0, 7]]))["size_gini"] == 0


def test_one_client_and_an_empty_one() -> None:
    assert heterogeneity_metrics(torch.tensor([[3, 5]]))["js_distance"] == 0
    f = heterogeneity_metrics(torch.tensor([[10, 0], [0, 0], [0, 10]]))
    assert f["js_distance"] == pytest.approx(1.0)
    assert f["min_samples"] == 0


def test_many_clients_are_sampled_by_seed() -> None:
    counts = torch.zeros(3000, 2, dtype=torch.int64)
    counts[:1500, 0] = 1
    counts[1500:, 1] = 1
    f = heterogeneity_metrics(counts)
    assert f["js_distance"] == pytest.approx(0.5, abs=0.01)
    assert f["js_distance"] == heterogeneity_metrics(counts)["js_distance"]
    assert f["js_distance"] != heterogeneity_metrics(counts, seed=1)["js_distance"]
