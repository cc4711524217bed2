"""FedGroup and FLACC: a model for every group of clients whose updates point alike."""

import numpy as np
import pytest
from federations import tiny_federation
from group_states import ORIGIN, PROGRAM, make_model, make_setting, training_reports
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine, tree
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import build
from shoal.stages.experts import expert_for, set_clusters
from shoal.stages.train import LearningRate, TrainAndAggregate


def test_who_is_in_no_group_changes_no_model():
    stage = TrainAndAggregate(PROGRAM, expert_for, LearningRate(0.1, 1))
    state = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(2.0, 2.0)], ("a", "b"), np.array([0, 1]))
    models = stage.fold(state, training_reports(a=(5.0, 5.0), e=(9.0, 9.0)), 0).models
    assert models["expert-000"]["w"].tolist() == [5, 5]
    assert models["expert-001"]["w"].tolist() == [2, 2]


def test_names_sort_in_the_order_of_groups():
    clients = [str(i) for i in range(1001)]
    state = set_clusters(ORIGIN, [make_model(float(i), 0.0) for i in range(1001)], clients, np.arange(1001))
    assert expert_for(state, "1000")["expert"]["w"][0] == 1000
    assert expert_for(state, "999")["expert"]["w"][0] == 999


def play(tiny, fleet, name, **options):
    built = build(name, make_setting(options={"cluster": options}))
    return engine.run(built, fleet(tiny), rounds=8, seed=0, central_samples=tiny.central, eval_every=8)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedgroup", {"groups": 2, "alpha": 2, "eta": 0.1}), ("flacc", {"patience": 1})],
)
def test_fleets_agree_from_the_first_round_to_groups_that_part(name, options):
    """tests/parity has too few rounds for FLACC's groups to part."""
    federation = tiny_federation(6)
    plain, vector = (play(federation, fleet, name, **options) for fleet in (PlainFleet, VectorFleet))
    assert len(plain.state.models) > 1
    assert len(plain.state.membership) == 6
    assert tree.max_abs_difference(plain.state.models, vector.state.models) < 1e-5
    assert tree.max_abs_difference(plain.state.membership, vector.state.membership) == 0
    assert tree.max_abs_difference(plain.state.memory, vector.state.memory) < 1e-5
    assert plain.ledger == vector.ledger


def test_flacc_is_fedavg_until_groups_part(tiny):
    fed = engine.run(build("fedavg", make_setting(cohort=3)), PlainFleet(tiny), rounds=4, seed=0)
    one = engine.run(build("flacc", make_setting(cohort=3)), PlainFleet(tiny), rounds=4, seed=0)
    assert tree.max_abs_difference(fed.state.models, one.state.models) == 0
    assert [r.bytes_up for r in fed.rounds] == [r.bytes_up for r in one.rounds]


def found(method, partition, rounds):
    fleet = shoal.partition(shoal.load("digits"), partition, clients=12, seed=0)
    state = shoal.run(method, fleet, rounds=rounds, cohort=6, epochs=2, lr=0.1, seed=0, eval_every=rounds).state
    labels = [int(state.membership[c].argmax()) for c in fleet]
    return labels, [fleet.planted_groups[c] for c in fleet] if fleet.planted_groups else None


@pytest.mark.parametrize(("method", "rounds"), [("fedgroup", 1), ("flacc", 14)])
def test_planted_label_groups_are_found(method, rounds):
    labels, truth = found(method, "groups:3,1.0", rounds)
    assert adjusted_rand_score(truth, labels) == 1


def test_nearly_iid_clients_stay_together():
    assert max(found("flacc", "iid", 13)[0]) == 0
