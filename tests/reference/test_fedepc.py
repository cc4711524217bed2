"""FedEPC's representation and clusters on real images (FedEPC (Tang et al. 2025)). The clusterer's own facts are in
test_density_clusters_facts.py, the bandit's in test_bandit_facts.py."""

from functools import cache

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal.client.sparsity import MeasureSparsity
from shoal.client.train import LocalTraining
from shoal.fleet.plain import PlainFleet
from shoal.models import load_model
from shoal.rng import derive_seed
from shoal.stages.cluster import SparsityClusters
from shoal.stages.vectors import flatten_params
from shoal.types import Plan, Task

pytestmark = pytest.mark.data
CLIENTS = 50


@cache
def fashion():
    return shoal.load("fashion-mnist", max_train_samples=10_000)


@cache
def represented(partition, seed):
    """Sparsity of the last hidden ReLU (64 channels) after one local epoch from common first weights."""
    fleet = shoal.partition(fashion(), partition, clients=CLIENTS, seed=seed)
    model = load_model("cnn-cifar", fleet.input_shape, 10)
    program = MeasureSparsity(LocalTraining(model, epochs=1, batch_size=32, lr=0.05))
    assert program.num_channels == 64
    tasks = {c: Task({"first": model.init(derive_seed(seed, "init"))}, {}, derive_seed(seed, c)) for c in fleet}
    reports = PlainFleet(fleet).execute(Plan(program, tasks))
    rows = torch.stack([flatten_params(reports[c].tensors["sparsity"]) for c in fleet]).double().numpy()
    truth = np.array([fleet.planted_groups[c] for c in fleet]) if fleet.planted_groups else None
    return rows, truth


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_planted_label_groups_are_found(groups):
    """One set of defaults; alpha is large, so that all clients of a block have similar label distributions."""
    rows, truth = represented(f"groups:{groups},100", seed=0)
    assert adjusted_rand_score(truth, SparsityClusters()(rows, 0)) > 0.9  # up to two clients may be in other clusters


def test_unequal_groups_are_found():
    """25 clients of one group and 10 of the other: most distances, and the median too, are then within a group."""
    rows, truth = represented("groups:2,100", seed=0)
    subset = np.concatenate([np.flatnonzero(truth == 0)[:25], np.flatnonzero(truth == 1)[:10]])
    assert adjusted_rand_score(truth[subset], SparsityClusters()(rows[subset], 0)) > 0.7
    assert adjusted_rand_score(truth[subset], SparsityClusters(0.30, 0.36, scale="median")(rows[subset], 0)) < 0.5


@pytest.mark.parametrize("partition", ["iid", "dirichlet:10"])
def test_nearly_iid_fleets_are_one_cluster(partition):
    rows, _ = represented(partition, seed=0)
    assert SparsityClusters()(rows, 0).max() == 0


def test_skewed_fleets_are_several_clusters():
    rows, _ = represented("dirichlet:0.1", seed=0)
    assert SparsityClusters()(rows, 0).max() >= 4
