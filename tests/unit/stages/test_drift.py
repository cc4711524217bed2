"""Sixty rounds of a fleet whose clients come, go and change."""

import pytest
import torch
from changing import ChangingFleet, MethodRun, SyntheticClients

from shoal.client.prior import LABEL_COUNTS
from shoal.client_table import ClientTable
from shoal.methods import Setting, build
from shoal.models import load_model

AGAIN = {
    "probe": {"first_round": 5, "every_rounds": 5},
    "prior": {"every_rounds": 5},
    "represent": {"every_rounds": 5},
    "gate": {"epochs": 3},
}
SKEWS = ([0.6, 0.3, 0.1, 0.0], [0.0, 0.6, 0.3, 0.1], [0.1, 0.0, 0.6, 0.3], [0.3, 0.1, 0.0, 0.6])


@pytest.fixture(scope="module")
def story():
    """What was observed at each event of the run."""
    world, seen = SyntheticClients(), {}
    model = load_model("mlp", (8,), 4)
    setting = Setting(model, rounds=60, cohort_size=6, epochs=1, batch_size=10, lr=0.1, eval_every=15, options=AGAIN)
    method = build("shoal", setting)
    data = {f"c{i:02d}": world.make_client(f"c{i:02d}", SKEWS[i % 4]) for i in range(12)}
    life = MethodRun(method, ChangingFleet(data))

    def note(name, *clients):
        accuracies = {c: life.accuracy(c) for c in clients or life.fleet.data}
        models = {c: sorted(life.method.models_for(life.state, c)) for c in clients}
        seen[name] = {
            "groups": life.clusters,
            "accuracy": accuracies,
            "models": models,
            "private": dict(life.fleet.private),
        }
        seen[name]["told"] = ClientTable.load(life.state, "represent")

    life.run_until(14)
    note("no shift")
    drifted = {f"c{i:02d}": world.make_client(f"c{i:02d}", SKEWS[i % 4], is_inverted=True) for i in range(1, 12, 2)}
    life.fleet.update_clients(**drifted)
    note("half of them drifted")
    life.run_until(16)
    note("split")
    life.run_until(30)
    note("recovered")
    life.fleet.update_clients(
        n0=world.make_client("n0", SKEWS[0]), n1=world.make_client("n1", SKEWS[1], is_inverted=True)
    )
    note("came", "n0", "n1")
    life.run_until(31)
    note("first report", "n0", "n1")
    gone = life.fleet.remove_clients("c02", "c03")
    life.run_until(41)
    note("before", "c00", "c04")
    life.fleet.update_clients(
        c00=world.make_client("c00", SKEWS[0], is_inverted=True), c04=world.make_client("c04", SKEWS[2])
    )
    note("one drifted", "c00", "c04")
    life.run_until(46)
    note("moved", "c00", "c04")
    life.fleet.update_clients(**gone)
    life.run_until(60)
    note("end")
    return seen, life


def test_without_a_shift_there_is_one_model(story):
    seen, _ = story
    assert seen["no shift"]["groups"] == {}
    assert min(seen["no shift"]["accuracy"].values()) > 0.85


def test_a_later_shift_is_found_at_the_next_probe(story):
    seen, _ = story
    assert seen["split"]["groups"] == {f"c{i:02d}": i % 2 for i in range(12)}
    odd = [f"c{i:02d}" for i in range(1, 12, 2)]
    lost, back = (sum(seen[k]["accuracy"][c] for c in odd) / 6 for k in ("half of them drifted", "recovered"))
    assert lost < 0.5
    assert back > 0.85


def test_a_late_client_has_the_global_model_at_once_and_a_prior_and_experts_after_its_first_report(story):
    seen, life = story
    assert set(map(tuple, seen["came"]["models"].values())) == {("global", "prior")}
    for client in ("n0", "n1"):
        assert client not in seen["came"]["private"]
        counts = torch.bincount(life.fleet.data[client]["train"].y, minlength=4)
        assert seen["first report"]["private"][client][LABEL_COUNTS].tolist() == counts.tolist()
        assert seen["first report"]["models"][client] == ["expert-000", "expert-001", "global", "prior"]
    assert {c: seen["first report"]["groups"][c] for c in ("n0", "n1")} == {"n0": 0, "n1": 1}


def test_only_the_drifted_client_is_reassigned(story):
    seen, _ = story
    before, after = seen["before"]["groups"], seen["moved"]["groups"]
    assert {c for c in after if after[c] != before[c]} == {"c00"}
    assert seen["moved"]["accuracy"]["c00"] > 0.9


def test_a_client_whose_labels_change_reports_them_again_and_stays_in_its_cluster(story):
    seen, life = story
    counts = torch.bincount(life.fleet.data["c04"]["train"].y, minlength=4).float()
    assert seen["before"]["private"]["c04"][LABEL_COUNTS].tolist() != counts.tolist()
    assert seen["moved"]["private"]["c04"][LABEL_COUNTS].tolist() == counts.tolist()
    place = seen["moved"]["told"].clients.index("c04")
    torch.testing.assert_close(seen["moved"]["told"]["labels"][place], counts / counts.sum())
    assert seen["moved"]["accuracy"]["c04"] > seen["one drifted"]["accuracy"]["c04"]


def test_clients_stay_in_their_clusters_and_return_to_them(story):
    seen, life = story
    moves = [f["probe.num_reassigned"] for f in life.round_metrics if "probe.num_reassigned" in f]
    assert sum(moves) == 1
    planted = {f"c{i:02d}": i % 2 for i in range(12)} | {"c00": 1, "n0": 0, "n1": 1}
    assert life.clusters == planted
    assert sorted(life.state.models) == ["expert-000", "expert-001", "global"]
    assert min(seen["end"]["accuracy"].values()) > 0.8
