"""Facts that a correct implementation of Pereira et al. 2025 shows, on its own partition of Fashion-MNIST's shape.

Clusters of labels have a file of their own (test_label_clusters.py), the 802.11ax exchange and the privacy accounting
are in tests/unit.
"""

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine
from shoal.client.gaussian_mechanism import label_noise_std, noisy_distribution
from shoal.clusterers.similar import SimilarClusters
from shoal.cost.costs import CostModel
from shoal.data import Dataset
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Samples

CLASSES, CLIENTS = 10, 100


def test_parameters():
    assert load_model("mlp", (1, 28, 28), 10).num_parameters == 52_500
    assert load_model("mlp-dropout", (1, 28, 28), 10).num_parameters == 52_500
    assert load_model("cnn-cifar", (3, 32, 32), 10).num_parameters == 73_418


@pytest.fixture(scope="module")
def federation():
    """49,000 samples, 4,900 of each class, partitioned by (1,5)-Dir over 100 clients. An input is a number."""
    numbers = torch.arange(49_000)
    samples = Samples(numbers[:, None].float(), numbers % CLASSES)
    dataset = Dataset("numbers", samples, Samples(samples.x[:10], samples.y[:10]), tuple(map(str, range(CLASSES))))
    return shoal.partition(dataset, "groups:5,1.0", clients=CLIENTS, seed=0, val_fraction=0.0, test_fraction=0.1)


def test_every_sample_goes_to_one_client_of_its_block(federation):
    numbers = []
    for index, client in enumerate(federation):
        labels = torch.cat([federation[client][split].y for split in ("train", "test")])
        numbers += torch.cat([federation[client][split].x for split in ("train", "test")]).flatten().tolist()
        assert set((labels // 2).tolist()) == {index // 20}  # 20 clients and 2 classes a block
    assert sorted(numbers) == list(range(49_000))


@pytest.mark.parametrize(("method", "num_clusters"), [("simclust", 5), ("repclust", 20)])
def test_every_round_takes_two_clients_of_each_partition(federation, method, num_clusters):
    options = {"cluster": {"num_clusters": num_clusters}}
    setting = Setting(load_model("linear", (1,), CLASSES), rounds=15, cohort_size=10, epochs=0, options=options)
    result = engine.run(build(method, setting), VectorFleet(federation), rounds=15, seed=0, eval_every=15)
    trained = [entry.clients for entry in result.ledger.entries if entry.stage == "train"]
    assert len(trained) == 15
    for cohort in trained:
        assert len(set(cohort)) == 10
        assert np.bincount([list(federation).index(c) // 20 for c in cohort]).tolist() == [2] * 5
    assert len(set(trained)) > 5  # and not always the same


def uniform_blocks(rho):
    """Returns label distributions as alpha goes to infinity, uniform over the classes of a block, and the blocks."""
    blocks = np.array_split(np.arange(CLASSES), rho)
    truth = np.repeat(np.arange(rho), CLIENTS // rho)
    p = np.zeros((CLIENTS, CLASSES))
    for client, block in enumerate(truth):
        p[client, blocks[block]] = 1 / len(blocks[block])
    return p, truth


def agreement(noise_scale, rho=5, seeds=5):
    p, truth = uniform_blocks(rho)
    agreements = []
    for seed in range(seeds):
        noisy = noisy_distribution(torch.from_numpy(p), label_noise_std(noise_scale, CLASSES), seed)
        agreements.append(
            adjusted_rand_score(truth, SimilarClusters(rho, random_state=seed).fit(noisy.numpy()).labels_)
        )
    return float(np.mean(agreements))


def test_noise_on_labels_blurs_the_groups():
    assert label_noise_std(1.0, CLASSES) == pytest.approx(0.1)
    assert agreement(0.0) == 1.0
    assert agreement(1.0) > 0.97
    assert 0.2 < agreement(3.0) < 0.65
    assert agreement(10.0) < 0.12


def test_fewer_blocks_are_harder_to_distinguish_under_noise():
    """Two classes of one half each stand out more than five of one fifth: contrary to what the paper expects."""
    assert agreement(2.0, rho=5) > agreement(2.0, rho=2)


def test_joules_of_a_client_and_round():
    """The MLP on 490 samples for 10 epochs at 5 W and 2 GFLOP/s, without gradients of the first layer's inputs."""
    costs = CostModel()
    flops = 490 * 10 * (3 * 104_792 - 2 * 784 * 64)
    seconds, joules = costs.compute_cost("c", flops)
    assert seconds == pytest.approx(0.524, abs=1e-3)
    assert joules == pytest.approx(2.622, abs=1e-3)
    radio_s, radio_joules = costs.radio_cost(4 * 52_500, 4 * 52_500)
    assert radio_s == pytest.approx(2 * 25.451e-3, abs=1e-6)
    assert radio_joules == pytest.approx(2.747e-3, abs=1e-6)
