"""What FedClusterEnsemble does on real images in label groups (FedClusterEnsemble (Freitas et al. 2025))."""

from functools import cache

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine
from shoal.client_table import ClientTable
from shoal.clusterers import NeighbourClusters
from shoal.experiment.assemble import assemble
from shoal.experiment.job import Job
from shoal.fleet.vector import VectorFleet
from shoal.models import load_model
from shoal.rng import derive_seed
from shoal.stages.vectors import flatten_params

pytestmark = pytest.mark.data
GROUPS = "labels:0-2/3-5/6-9"


@cache
def fashion(max_train_samples):
    return shoal.load("fashion-mnist", max_train_samples=max_train_samples)


def small_federation(clients, seed, max_train_samples=3000, partition=GROUPS):
    return shoal.partition(fashion(max_train_samples), partition, clients=clients, seed=seed)


def run_fce(federation, rounds, seed=0, **options):
    job = Job(method="fce", model="mlp", rounds=rounds, epochs=1, batch_size=32, lr=0.01, momentum=0.9, set=options)
    experiment = assemble(job, "fce", federation)
    result = engine.run(
        experiment.method,
        VectorFleet(federation),
        rounds=rounds,
        seed=seed,
        central_samples=federation.central,
        eval_every=rounds,
    )
    return experiment.method, result


@cache
def first_round(clients, seed):
    federation = small_federation(clients, seed)
    return federation, run_fce(federation, 1, seed)[1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("clients", "sizes"), [(10, [4, 3, 3]), (20, [7, 7, 6]), (30, [10, 10, 10])])
def test_three_planted_groups_are_found(clients, sizes, seed):
    federation, result = first_round(clients, seed)
    labels = {c: int(row.argmax()) for c, row in result.state.membership.items()}
    assert adjusted_rand_score([federation.planted_groups[c] for c in labels], list(labels.values())) == 1
    assert np.bincount(list(labels.values())).tolist() == sizes
    assert result.rounds[0].metrics["cluster.noise"] == 0


def test_weights_and_their_changes_in_training_give_the_same_clusters():
    federation, result = first_round(20, 0)
    model = load_model("mlp", federation.input_shape, 10)
    first = model.init(derive_seed(0, "init"))
    last = ClientTable.load(result.state, "cluster")["last"].double().numpy()
    change = last - flatten_params({k: first[k] for k in model.head}).double().numpy()
    assert np.abs(change).max() < np.abs(last).max()
    assert (NeighbourClusters().fit(last).labels_ == NeighbourClusters().fit(change).labels_).all()


@pytest.mark.parametrize("eps_factor", [0.3, 0.7])
def test_the_radius_does_not_matter_much(eps_factor):
    federation, result = first_round(30, 1)
    table = ClientTable.load(result.state, "cluster")
    labels = NeighbourClusters(eps_factor).fit(table["last"].double().numpy()).labels_
    assert adjusted_rand_score([federation.planted_groups[c] for c in table.clients], labels) == 1


def test_without_dense_clusters_there_is_one_model():
    _, result = run_fce(small_federation(20, 0, partition="iid"), 1)
    assert len(result.state.models) == 1


def test_in_label_groups_the_server_can_infer_label_sets():
    """After the first round the bias of a class has risen exactly if the client has the class, in all 10 x 10 cases.
    The bias of a class would fall if the client had fewer samples of it than the model expected."""
    federation, result = first_round(10, 0)
    table = ClientTable.load(result.state, "cluster")
    for client, risen in zip(table.clients, table["risen"], strict=True):
        is_present = torch.zeros(10, dtype=torch.bool)
        is_present[federation[client]["train"].y.unique()] = True
        assert torch.equal(risen, is_present)


@cache
def trained(data, seed):
    federation = shoal.partition(shoal.load(data, max_train_samples=6000), GROUPS, clients=20, seed=seed)
    method, result = run_fce(federation, 15, seed, serve={"rule": "density"})
    x, y = federation.central
    owner = torch.tensor([0] * 3 + [1] * 3 + [2] * 4)[y]
    models = method.models_for(result.state, None)
    experts = {k: m for k, m in models.items() if k.startswith("expert")}
    with torch.no_grad():
        logits = torch.stack([method.predict({k: m}, {}, x) for k, m in sorted(experts.items())])
        largest, density = method.predict_routed(experts, {}, x), method.predict_routed(models, {}, x)
    oracle = (logits.argmax(-1).gather(0, owner[None])[0] == y).float().mean()
    return oracle, *((prediction.logits.argmax(-1) == y).float().mean() for prediction in (largest, density))


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
def test_the_right_expert_is_accurate_and_the_largest_logit_does_not_find_it(data):
    """Routing by densities is better than by the largest logit, by 4 points on MNIST and 15 on Fashion-MNIST."""
    oracle, largest, density = trained(data, 0)
    assert oracle > 0.9
    assert largest < density < oracle
    assert density > largest + {"mnist": 0.04, "fashion-mnist": 0.15}[data]


def test_masks_change_nothing_where_models_never_predict_absent_classes():
    """Right after training, nearly all samples have the largest logit for a class that the expert's cluster has."""
    federation = small_federation(20, 0, max_train_samples=6000)
    predictions = []
    for mask in ("none", "inferred"):
        method, result = run_fce(federation, 6, serve={"mask": mask})
        with torch.no_grad():
            predictions.append(
                method.predict(method.models_for(result.state, None), {}, federation.central.x).argmax(-1)
            )
    assert (predictions[0] == predictions[1]).float().mean() > 0.995
