"""Facts about SimClust and RepClust in the paper's setting of 100 clients and ten classes."""

from __future__ import annotations

from functools import cache
from math import inf, log

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from shoal.clusterers.repulsive import RepulsiveClusters, objectives
from shoal.clusterers.similar import SimilarClusters
from shoal.clusterers.symmetric_kl import symmetric_kl

APART = (1 - 2e-6) * log(5e5)  # two clients, each uniform over two classes, none in common: 13.12234
SEEDS = range(5)


def label_distributions(rho, alpha, seed, clients=100, classes=10, of_class=4900):
    """(alpha, rho)-Dir: classes and clients cut into rho blocks, each class shared out within its block."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((clients, classes))
    blocks = np.array_split(np.arange(clients), rho)
    for inside, labels in zip(blocks, np.array_split(np.arange(classes), rho), strict=True):
        for label in labels:
            uniform = alpha == inf
            counts[inside, label] = 1 if uniform else rng.multinomial(of_class, rng.dirichlet([alpha] * len(inside)))
    return counts / counts.sum(1, keepdims=True), np.repeat(np.arange(rho), [len(b) for b in blocks])


@cache
def repulsive(n_clusters, rho, alpha, seed, swaps="closest", top=None):
    clusterer = RepulsiveClusters(n_clusters, random_state=seed, swaps=swaps, top=top)
    return clusterer.fit(label_distributions(rho, alpha, seed)[0])


def count_by_partition(labels, partition):
    """Returns the number of clients of each partition in each cluster."""
    return np.array([np.bincount(partition[labels == g], minlength=partition.max() + 1) for g in np.unique(labels)])


def test_disjoint_clients_are_13_12234_apart():
    p, partition = label_distributions(5, inf, 0)
    distance = symmetric_kl(p, p)
    same = partition[:, None] == partition
    assert pytest.approx(13.12234, abs=5e-6) == APART
    np.testing.assert_allclose(distance[~same], APART, rtol=1e-12)
    assert (distance[same] == 0).all()


def test_divergence_is_symmetric_and_zero_on_the_diagonal():
    p, _ = label_distributions(5, 1.0, 0)
    distance = symmetric_kl(p, p)
    np.testing.assert_allclose(distance, distance.T, atol=1e-12)
    assert (np.diag(distance) == 0).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("n_clusters", "rho"), [(10, 1), (20, 2), (20, 5)])
def test_clusters_have_equal_sizes_and_j_rises_at_every_swap(n_clusters, rho, seed):
    fitted = repulsive(n_clusters, rho, 1.0, seed)
    assert np.bincount(fitted.labels_).tolist() == [100 // n_clusters] * n_clusters
    assert (np.diff(fitted.history_) > 0).all()
    assert len(fitted.history_) > 10
    assert fitted.history_[-1] == pytest.approx(fitted.within_ - fitted.between_)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_diverse_and_more_similar_than_random_clusters(seed):
    p, partition = label_distributions(5, 1.0, seed)
    rng = np.random.default_rng(seed)
    within, between = np.mean([objectives(p, rng.permutation(100) % 20) for _ in range(20)], axis=0)
    fitted = repulsive(20, 5, 1.0, seed)
    assert fitted.within_ > 1.15 * within
    assert fitted.between_ < between / 5
    assert (count_by_partition(fitted.labels_, partition) == 1).all()


def test_objectives_as_in_the_study():
    """Means over five seeds; the study has 13.31 and 0.261 for RepClust, 10.90 and 2.207 for random clusters."""
    fits = [repulsive(20, 5, 1.0, seed) for seed in SEEDS]
    assert np.mean([f.within_ for f in fits]) == pytest.approx(13.31, abs=0.05)
    assert np.mean([f.between_ for f in fits]) == pytest.approx(0.261, abs=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_ideal_clusters_of_five_have_one_client_of_each_partition(seed):
    _, partition = label_distributions(5, inf, seed)
    fitted = repulsive(20, 5, inf, seed)
    assert (count_by_partition(fitted.labels_, partition) == 1).all()
    assert fitted.within_ == pytest.approx(APART)
    assert fitted.between_ == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_ideal_clusters_of_ten_need_swaps_of_all_pairs(seed):
    # two of each partition in a cluster of ten: 45 - 5 of 45 pairs differ, 40/45 * 13.12234 = 11.664
    closest, every = repulsive(10, 5, inf, seed), repulsive(10, 5, inf, seed, swaps="all")
    assert closest.within_ < 11.6
    assert closest.between_ > 0.01
    assert every.within_ == pytest.approx(40 / 45 * APART)
    assert every.within_ == pytest.approx(11.664, abs=5e-4)
    assert every.between_ == pytest.approx(0, abs=1e-12)


def test_few_top_clusters_are_not_enough():
    """All of 20 ideal clusters are perfect if the 10 closest take part in swaps, and hardly any if 2 do."""
    _, partition = label_distributions(5, inf, 0)

    def perfect(top):
        counts = [count_by_partition(repulsive(20, 5, inf, s, top=top).labels_, partition) for s in SEEDS]
        return np.mean([(h == 1).all(1).mean() for h in counts])

    assert perfect(10) == 1
    assert perfect(5) < 0.5
    assert perfect(2) < 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rho", [2, 5])
def test_similar_clusters_are_the_partitions(rho, seed):
    p, partition = label_distributions(rho, 1.0, seed)
    mean, jeffreys = (SimilarClusters(rho, random_state=seed, centre=centre).fit(p) for centre in ("mean", "jeffreys"))
    assert adjusted_rand_score(partition, mean.labels_) == 1
    assert adjusted_rand_score(partition, jeffreys.labels_) == 1
    assert 0.85 < jeffreys.inertia_ / mean.inertia_ < 0.99
