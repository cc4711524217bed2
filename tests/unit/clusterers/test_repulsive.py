"""Clusters of clients whose labels differ."""

from itertools import combinations
from math import log

import numpy as np
import pytest
from label_distributions import ONE_HOT, clusters_as_values, draw_label_distributions, reference_symmetric_kl

from shoal.clusterers import repulsive
from shoal.clusterers.repulsive import RepulsiveClusters, objectives
from shoal.errors import UserError


def naive_objectives(rows, labels):
    """Returns both objectives of Eq. (3) by plain sums: ordered pairs within, g < g' between."""
    clusters = [rows[labels == g] for g in np.unique(labels)]
    within = [
        sum(reference_symmetric_kl(p, q) for p in x for q in x) / (len(x) * (len(x) - 1)) if len(x) > 1 else 0.0
        for x in clusters
    ]
    between = sum(reference_symmetric_kl(p.mean(0), q.mean(0)) for p, q in combinations(clusters, 2))
    return np.mean(within), between / max(len(clusters) * (len(clusters) - 1), 1)


class TestObjectives:
    def test_by_hand(self):
        # clusters {e0, e1} and {e0, e0}: within (13.8155 + 0)/2 with one-hot distance D = (1 - 1e-6) ln 1e6;
        # means (½, ½) and (1, 0 -> 1e-6), so d = ½ [½ ln ½ - ln ½ + (½ - 1e-6) ln 5e5], divided by G(G-1) = 2
        within, between = objectives(np.eye(2)[[0, 1, 0, 0]], [7, 7, 3, 3])
        assert within == pytest.approx((1 - 1e-6) * log(1e6) / 2)
        assert between == pytest.approx(0.5 * (0.5 * log(2) + (0.5 - 1e-6) * log(5e5)) / 2)

    @pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2], [0] * 6, [0, 1, 2, 3, 4, 5]])
    @pytest.mark.parametrize(
        "rows",
        [draw_label_distributions(6), draw_label_distributions(6).round(1), np.zeros((6, 3))],
        ids=["drawn", "rounded", "zeros"],
    )
    def test_agree_with_the_double_sums(self, rows, labels):
        assert objectives(rows, labels) == pytest.approx(naive_objectives(rows, np.array(labels)), abs=1e-12)

    def test_empty(self):
        assert objectives(np.empty((0, 3)), []) == (0, 0)

    def test_a_label_for_each_row(self):
        with pytest.raises(UserError, match=r"labels has shape \(2,\); it must be \(6,\)"):
            objectives(draw_label_distributions(6), [0, 1])


def j(rows, labels):
    within, between = naive_objectives(rows, labels)
    return within - between


def algorithm_1(rows, labels):
    """Algorithm 1 as printed, with J computed again for every candidate swap."""
    labels, count = labels.copy(), labels.max() + 1

    def closest(g):
        pairs = combinations(np.flatnonzero(labels == g), 2)
        return min((reference_symmetric_kl(rows[a], rows[b]), a) for a, b in pairs)

    improved = True
    while improved:
        improved = False
        order = sorted(range(count), key=closest)
        for k, other in combinations(order, 2):
            pair = [closest(k)[1], closest(other)[1]]
            swapped = labels.copy()
            swapped[pair] = labels[pair[::-1]]
            if j(rows, swapped) > j(rows, labels) + 1e-11:
                labels, improved = swapped, True
    return labels


class TestRepulsiveClusters:
    @pytest.mark.parametrize("seed", range(3))
    def test_agrees_with_algorithm_1(self, seed):
        x = draw_label_distributions(16, seed=seed)
        fitted = RepulsiveClusters(4, random_state=seed)
        order = repulsive._shuffled_order(x, seed)
        expected = algorithm_1(x[order], np.arange(16) % 4)
        assert len(fitted.fit(x).history_) > 2
        assert clusters_as_values(x[order], expected) == clusters_as_values(x, fitted.labels_)

    @pytest.mark.parametrize("swaps", ["closest", "all"])
    @pytest.mark.parametrize(("rows", "n_clusters"), [(6, 3), (20, 4), (23, 5), (7, 4), (9, 1)])
    def test_sizes_history_and_objectives(self, swaps, rows, n_clusters):
        x = draw_label_distributions(rows).round(2)
        fitted = RepulsiveClusters(n_clusters, swaps=swaps).fit(x)
        sizes = np.bincount(fitted.labels_)
        assert len(sizes) == n_clusters
        assert sizes.max() - sizes.min() <= (rows % n_clusters > 0)
        assert (np.diff(fitted.history_) > 0).all()
        assert fitted.history_[-1] == pytest.approx(j(x, fitted.labels_), abs=1e-10)
        assert (fitted.within_, fitted.between_) == pytest.approx(naive_objectives(x, fitted.labels_), abs=1e-10)

    def test_swaps_of_all_pairs_end_where_no_swap_helps(self):
        for seed in range(5):
            x = draw_label_distributions(9, seed=seed).round(2)
            labels = RepulsiveClusters(3, random_state=seed, swaps="all").fit(x).labels_
            best = j(x, labels)
            for a, b in combinations(range(9), 2):
                other = labels.copy()
                other[[a, b]] = labels[[b, a]]
                assert j(x, other) <= best + 1e-9

    def test_swaps_of_all_pairs_reach_the_best_of_15_partitions(self):
        # six clients in three pairs: the partner of 0 in 5 ways, the partner of the next free one in 3
        x = draw_label_distributions(6)
        best = max(
            j(x, np.array(labels))
            for labels in {(0, *rest) for rest in np.ndindex(3, 3, 3, 3, 3)}
            if sorted(labels) == [0, 0, 1, 1, 2, 2]
        )
        fitted = [RepulsiveClusters(3, random_state=seed, swaps="all").fit(x).history_[-1] for seed in range(4)]
        assert max(fitted) == pytest.approx(best)

    def test_two_kinds_of_rows_are_mixed_by_hand(self):
        # four clusters of two rows, of four e0 and four e1: at best every cluster has both kinds, J = (1 - 1e-6) ln 1e6
        for seed in range(10):
            fitted = RepulsiveClusters(4, random_state=seed).fit(np.eye(2)[[0, 0, 0, 0, 1, 1, 1, 1]])
            assert sorted(fitted.labels_[:4]) == sorted(fitted.labels_[4:]) == [0, 1, 2, 3]
            assert fitted.history_[-1] == pytest.approx((1 - 1e-6) * log(1e6))

    def test_a_swap_needs_a_rise_above_rounding(self):
        fitted = RepulsiveClusters(4).fit(np.full((20, 7), 1 / 7))
        assert fitted.history_.tolist() == pytest.approx([0.0], abs=1e-12)
        assert fitted.n_iter_ == 1

    def test_sweeps_are_limited(self):
        x = draw_label_distributions(40)
        assert RepulsiveClusters(10).fit(x).n_iter_ > 1
        assert RepulsiveClusters(10, max_iter=1).fit(x).n_iter_ == 1

    def test_only_the_top_clusters_swap(self):
        x = draw_label_distributions(40)
        all_clusters, few = RepulsiveClusters(10).fit(x), RepulsiveClusters(10, top=2).fit(x)
        assert all_clusters.history_[0] == few.history_[0]
        assert len(few.history_) < len(all_clusters.history_)
        assert RepulsiveClusters(10, top=99).fit(x).labels_.tolist() == all_clusters.labels_.tolist()

    def test_seeds_start_from_different_clusters(self):
        x = draw_label_distributions(40)
        assert (
            RepulsiveClusters(10, random_state=1).fit(x).history_[0]
            != RepulsiveClusters(10, random_state=2).fit(x).history_[0]
        )

    def test_windows_and_blocks_change_nothing(self, monkeypatch):
        x = draw_label_distributions(60)
        expected = [RepulsiveClusters(n).fit(x).labels_.tolist() for n in (3, 20)]
        monkeypatch.setattr(repulsive, "_WINDOW", 3)
        monkeypatch.setattr(repulsive, "_BLOCK", 4)
        assert [RepulsiveClusters(n).fit(x).labels_.tolist() for n in (3, 20)] == expected

    @pytest.mark.parametrize("bad", [{"swaps": "some"}, {"top": 1}, {"top": 2.5}, {"max_iter": 0}])
    def test_bad_parameters(self, bad):
        (name,) = bad
        with pytest.raises(UserError, match=f"^{name} is "):
            RepulsiveClusters(2, **bad).fit(ONE_HOT)
