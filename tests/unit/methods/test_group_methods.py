"""FedGroup and FLACC: a model for every cluster of clients with similar updates."""

import numpy as np
import pytest
from cluster_states import ORIGIN, PROGRAM, make_model, make_setting, training_reports
from federations import tiny_federation
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine, tree
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import build
from shoal.stages.experts import expert_for, set_clusters
from shoal.stages.train import LearningRate, TrainAndAggregate


def test_an_unassigned_client_changes_no_model():
    stage = TrainAndAggregate(PROGRAM, expert_for, LearningRate(0.1, 1))
    state = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(2.0, 2.0)], ("a", "b"), np.array([0, 1]))
    models = stage.fold(state, training_reports(a=(5.0, 5.0), e=(9.0, 9.0)), 0).models
    assert models["expert-000"]["w"].tolist() == [5, 5]
    assert models["expert-001"]["w"].tolist() == [2, 2]


def test_names_sort_in_the_order_of_clusters():
    clients = [str(i) for i in range(1001)]
    state = set_clusters(ORIGIN, [make_model(float(i), 0.0) for i in range(1001)], clients, np.arange(1001))
    assert expert_for(state, "1000")["expert"]["w"][0] == 1000
    assert expert_for(state, "999")["expert"]["w"][0] == 999


def run_method(tiny, fleet, name, **options):
    method = build(name, make_setting(options={"cluster": options}))
    return engine.run(method, fleet(tiny), rounds=8, seed=0, central_samples=tiny.central, eval_every=8)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedgroup", {"num_clusters": 2, "alpha": 2, "eta": 0.1}), ("flacc", {"patience": 1})],
)
def test_fleets_agree_until_clusters_separate(name, options):
    """tests/parity has too few rounds for the clusters of FLACC to separate."""
    federation = tiny_federation(6)
    plain, vector = (run_method(federation, fleet, name, **options) for fleet in (PlainFleet, VectorFleet))
    assert len(plain.state.models) > 1
    assert len(plain.state.membership) == 6
    assert tree.max_abs_difference(plain.state.models, vector.state.models) < 1e-5
    assert tree.max_abs_difference(plain.state.membership, vector.state.membership) == 0
    assert tree.max_abs_difference(plain.state.memory, vector.state.memory) < 1e-5
    assert plain.ledger == vector.ledger


def test_flacc_is_fedavg_until_clusters_separate(tiny):
    fedavg = engine.run(build("fedavg", make_setting(cohort_size=3)), PlainFleet(tiny), rounds=4, seed=0)
    flacc = engine.run(build("flacc", make_setting(cohort_size=3)), PlainFleet(tiny), rounds=4, seed=0)
    assert tree.max_abs_difference(fedavg.state.models, flacc.state.models) == 0
    assert [r.bytes_up for r in fedavg.rounds] == [r.bytes_up for r in flacc.rounds]


def find_clusters(method, partition, rounds):
    fleet = shoal.partition(shoal.load("digits"), partition, clients=12, seed=0)
    state = shoal.run(method, fleet, rounds=rounds, cohort=6, epochs=2, lr=0.1, seed=0, eval_every=rounds).state
    labels = [int(state.membership[c].argmax()) for c in fleet]
    return labels, [fleet.planted_groups[c] for c in fleet] if fleet.planted_groups else None


@pytest.mark.parametrize(("method", "rounds"), [("fedgroup", 1), ("flacc", 14)])
def test_planted_label_groups_are_found(method, rounds):
    labels, truth = find_clusters(method, "groups:3,1.0", rounds)
    assert adjusted_rand_score(truth, labels) == 1


def test_nearly_iid_clients_stay_together():
    assert max(find_clusters("flacc", "iid", 13)[0]) == 0
