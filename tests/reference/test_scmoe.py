"""Facts that a correct SCMoE-PFL shows (Li et al. 2026): what leaves a client, a single cluster, and planted groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation

from shoal import engine, tree
from shoal.clusterers import OverlappingClusters
from shoal.clusterers.directions import principal_directions
from shoal.codec import encode_report, encode_task
from shoal.cost.ledger import Ledger
from shoal.data import load, partition
from shoal.data.federation import Federation
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Samples

MODEL = load_model("mlp", (6,), 4)


def method(name, rounds=3, **options):
    return build(name, Setting(MODEL, rounds=rounds, cohort_size=6, batch_size=8, options=options))


class RecordingFleet(PlainFleet):
    """Keeps every byte that would be sent in a round, without evaluation."""

    def execute(self, plan):
        reports = super().execute(plan)
        if plan.program.name != "evaluate":
            self.sent = [*getattr(self, "sent", []), *map(encode_task, plan.tasks.values())]
            self.sent += [encode_report(replace(r, flops=0)) for r in reports.values()]
        return reports


def with_other_sensitive_samples(federation):
    """Returns a federation with the same samples of low sensitivity, but other samples of high sensitivity."""
    g, clients = torch.Generator().manual_seed(99), {}
    for c in federation:
        data = federation[c]
        splits = {"test": data["test"]}
        for split in ("train", "val"):
            low, high = data[f"{split}/low"], data[f"{split}/high"]
            x = torch.cat([low.x, 5 * torch.randn(high.x.shape, generator=g)])
            splits[split] = Samples(x, torch.cat([low.y, (high.y + 1) % 4]))
        clients[c] = splits
    return Federation.from_clients(clients, federation.central, federation.classes)


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_sensitive_samples_influence_nothing_that_is_sent(start, tiny):
    ours, theirs = RecordingFleet(tiny), RecordingFleet(with_other_sensitive_samples(tiny))
    runs = [engine.run(method("scmoe", personal={"start": start}), f, rounds=3, seed=0) for f in (ours, theirs)]
    assert ours.sent == theirs.sent
    assert tree.max_abs_difference(runs[0].state.models, runs[1].state.models) == 0
    assert tree.max_abs_difference(runs[0].state.membership, runs[1].state.membership) == 0
    # Personal models differ, as they should.
    assert tree.max_abs_difference(dict(ours.private), dict(theirs.private)) > 0


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_no_number_of_a_personal_model_or_gate_is_sent(start, tiny):
    fleet = RecordingFleet(tiny)
    engine.run(method("scmoe", personal={"start": start}), fleet, rounds=3, seed=0)
    wire = b"".join(fleet.sent)
    for private in fleet.private.values():
        for kind in ("model", "gate"):
            for x in private[kind].values():
                assert x.numpy().tobytes() not in wire
    received = fleet.sent[0]
    first_models = method("scmoe").init(0).models
    assert any(x.numpy().tobytes() in received for x in tree.leaves(first_models))  # a sent tensor can be found


def test_one_cluster_is_fedavg_on_samples_of_low_sensitivity(tiny):
    one = method("scmoe", cluster={"algorithm": "one"}, components={"gate": False})
    fedavg = method("fedavg", train={"sensitivity": "low"})
    a, b = (engine.run(m, VectorFleet(tiny), rounds=3, seed=0) for m in (one, fedavg))
    assert tree.max_abs_difference(a.state.models["expert-000"], b.state.models["global"]) == 0
    assert a.accuracy == b.accuracy


def test_experts_weight_clients_by_samples_of_low_sensitivity(tiny):
    fleet = PlainFleet(tiny)
    m = method("scmoe")
    stage = next(s for s in m.stages if s.name == "train")
    state = replace(m.init(0), roster=tuple(tiny), cohort=tuple(tiny))
    reports = fleet.execute(stage.plan(state, 0))
    assert {c: r.counts for c, r in reports.items()} == {c: {"train": len(tiny[c]["train/low"].y)} for c in tiny}


def test_directions_do_not_depend_on_the_length_of_an_update():
    rows = np.random.default_rng(0).normal(size=(9, 40))
    scaled = rows * np.random.default_rng(1).uniform(0.01, 100, (9, 1))
    np.testing.assert_allclose(principal_directions(scaled), principal_directions(rows), atol=1e-9)


def test_three_orthogonal_groups_centred():
    rows = np.repeat(np.eye(3), 4, axis=0)
    fitted = OverlappingClusters(3, threshold=0.2).fit(principal_directions(rows, 1.0, is_centred=True))
    assert fitted.membership_.sum(1).tolist() == [1] * 12
    assert [fitted.labels_[k : k + 4].tolist().count(fitted.labels_[k]) for k in (0, 4, 8)] == [4, 4, 4]
    assert len(set(fitted.labels_.tolist())) == 3
    assert fitted.centre_similarity_ == pytest.approx(-0.5)


@pytest.mark.parametrize("num_clusters", [3, 4, 5])
def test_planted_groups_are_found_by_training(num_clusters):
    """Digits in three groups of labels, from one round of training of the first model."""
    from sklearn.metrics import adjusted_rand_score

    for seed in (0, 1):
        federation = partition(load("digits", seed=seed), "labels:0-2/3-5/6-9", clients=12, seed=seed)
        setting = Setting(
            load_model("mlp", (1, 8, 8), 10),
            rounds=2,
            cohort_size=12,
            options={"cluster": {"num_clusters": num_clusters}},
        )
        m = build("scmoe", setting)
        result = engine.run(replace(m, stages=m.stages[:-1]), VectorFleet(federation), rounds=2, seed=seed)
        labels = [int(result.state.membership[c].argmax()) for c in federation]
        assert adjusted_rand_score([federation.planted_groups[c] for c in federation], labels) == 1.0
        assert all(row.sum() == 1 for row in result.state.membership.values())
        assert len(result.state.models) == 3


def test_a_client_that_never_trained_is_served(tiny):
    result = engine.run(method("scmoe"), PlainFleet(tiny), rounds=3, seed=0, central_samples=tiny.central)
    assert result.accuracy["central"] > 0.5


def test_small_cohorts():
    """With a cohort of two, a client that was never selected is served too."""
    federation = tiny_federation(8)
    m = build("scmoe", Setting(MODEL, rounds=4, cohort_size=2, batch_size=8))
    result = engine.run(m, VectorFleet(federation), rounds=4, seed=0, central_samples=federation.central)
    assert set(result.evaluation.clients) == set(federation)
    assert len(result.state.membership) < 8


def test_experts_of_personalisation_are_not_sent_again_for_training():
    """After an evaluated round every client has its experts cached, so the next round's tasks contain none."""
    federation = tiny_federation(6)
    ledger = Ledger()
    engine.run(method("scmoe"), VectorFleet(federation), rounds=2, seed=0, ledger=ledger)
    down = {(entry.round, entry.stage): int(entry.bytes_down.sum()) for entry in ledger.entries}
    size = sum(x.numel() * 4 for x in MODEL.init(0).values())
    assert down[1, "train"] > 6 * size
    assert down[2, "train"] < size


def test_a_gate_is_kept_in_rounds_without_gate_training(tiny):
    """A personal model is trained every round and replaces the private state, in which the gate must stay."""
    m = build(
        "scmoe",
        Setting(MODEL, rounds=4, cohort_size=6, batch_size=8, eval_every=2, options={"personal": {"start": "cold"}}),
    )
    fleet = PlainFleet(tiny)
    engine.run(m, fleet, rounds=3, seed=0, eval_every=2)
    assert all({"model", "gate", "experts"} <= private.keys() for private in fleet.private.values())
