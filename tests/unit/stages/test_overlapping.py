"""The server of SCMoE-PFL: overlapping clusters, a model for each, and the models that clients receive."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shoal import engine, tree
from shoal.client.model_choice import ChooseAndTrain
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages import overlapping
from shoal.stages.overlapping import FormOverlappingClusters, OverlapRule, experts_for, update_direction
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Report, ServerState

MODEL = load_model("linear", (2,), 2)


def stage(**kw):
    clusters = FormOverlappingClusters(
        OverlapRule(**{"num_clusters": 2, "validate": False, "explained_variance": 1.0} | kw)
    )
    program, keys = ChooseAndTrain(LocalTraining(MODEL)), {"trainable": MODEL.trainable, "server_updates": (clusters,)}
    return TrainAndAggregate(program, experts_for, LearningRate(0.1, 9), **keys)


def sent(change, rows=1, place=0):
    """A report of a client whose training changed the first weights by this much, from zeros."""
    model = {"head.bias": torch.zeros(2), "head.weight": torch.tensor([change, [0.0, 0.0]])}
    return Report({"model": model, "choice": {"place": torch.tensor(place)}}, {"loss": (1.0, 1.0)}, {"train": rows})


def zeros(count=1):
    model = {"head.bias": torch.zeros(2), "head.weight": torch.zeros(2, 2)}
    return ServerState(0, {f"expert-{k:03d}": {n: x + k for n, x in model.items()} for k in range(count)})


EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


class TestFold:
    def test_by_hand(self):
        # the least similar pair is east and west: both seed; north has cosine 0 to both, and is in both from -0.1 on
        reports = {"a": sent([2.0, 0.0], 1), "b": sent(WEST, 3), "c": sent([0.0, 5.0], 4)}
        state = stage(threshold=-0.1).fold(zeros(), reports, 0)
        assert {c: m.tolist() for c, m in state.membership.items()} == {"a": [1, 0], "b": [0, 1], "c": [1, 1]}
        first, second = (m["head.weight"][0].tolist() for m in state.models.values())
        assert first == pytest.approx([2 / 5, 20 / 5])  # (1 [2, 0] + 4 [0, 5]) / 5
        assert second == pytest.approx([-3 / 7, 20 / 7])
        assert state.round_metrics == {"train.experts": 2.0, "train.overlap": pytest.approx(4 / 3)}

    def test_an_update_is_from_the_model_of_choice(self):
        # of models 0 and 1 everywhere, b trained the second to (1, 0): it went west and south, not east
        state = replace(zeros(2), membership={c: torch.ones(2) for c in "ab"})
        remembered = stage().fold(state, {"a": sent(EAST), "b": sent([1.0, 1.0], place=1)}, 0).memory["train"]
        rows = torch.tensor([[0, 0, -1.0, 0, 0, 0], [1, 1, 0, 0, 1, 1]])  # received - trained; bias, then weight
        assert torch.allclose(remembered["direction"], F.normalize(rows, dim=1))

    def test_a_client_that_did_not_report_is_clustered_by_its_last_update(self):
        s = stage()
        state = s.fold(zeros(), {"a": sent(EAST), "b": sent(WEST), "c": sent(EAST), "d": sent(WEST)}, 0)
        west = state.models["expert-001"]["head.weight"][0].tolist()
        state = s.fold(replace(state, round=1), {"a": sent([3.0, 0.0])}, 0)
        assert state.membership["c"].tolist() == state.membership["a"].tolist()
        assert state.membership["b"].tolist() == state.membership["d"].tolist() != state.membership["a"].tolist()
        mine, theirs = (state.models[f"expert-{int(state.membership[c].argmax()):03d}"] for c in "ab")
        assert mine["head.weight"][0].tolist() == [3.0, 0.0]
        assert theirs["head.weight"][0].tolist() == west  # no member was in the cohort: unchanged

    def test_clustered_once(self):
        s = stage(every_rounds=0)
        state = s.fold(zeros(), {"a": sent(EAST), "b": sent(WEST)}, 0)
        before = {c: m.tolist() for c, m in state.membership.items()}
        state = s.fold(replace(state, round=1), {"a": sent(WEST), "b": sent(EAST)}, 0)
        assert {c: m.tolist() for c, m in state.membership.items()} == before
        state = s.fold(replace(state, round=2), {"n": sent(EAST)}, 0)  # somebody new
        assert set(state.membership) == {"a", "b", "n"}

    def test_an_empty_round(self):
        state = zeros()
        after = stage().fold(state, {}, 0)
        assert after.models == state.models and not after.membership and not after.memory

    def test_clients_without_samples_are_in_no_cluster(self):
        state = stage().fold(zeros(), {"a": sent(EAST, 2), "b": sent(WEST, 0)}, 0)
        assert set(state.membership) == {"a"}
        assert [m["head.weight"][0].tolist() for m in state.models.values()] == [EAST]
        assert len(experts_for(state, "b")) == 1

    def test_what_diverged_reaches_the_models(self):
        """The engine detects it there and suggests a remedy."""
        state = stage().fold(zeros(), {"a": sent(EAST), "b": sent([float("nan"), 0.0])}, 0)
        assert not all(m["head.weight"].isfinite().all() for m in state.models.values())

    @pytest.mark.parametrize("algorithm", ["kmeans", "hierarchical"])
    def test_partitions_to_compare(self, algorithm):
        reports = {f"c{i}": sent(v) for i, v in enumerate([EAST, [1.0, 0.1], WEST, [-1.0, 0.1]])}
        state = stage(algorithm=algorithm).fold(zeros(), reports, 0)
        labels = [int(state.membership[c].argmax()) for c in sorted(reports)]
        assert labels[0] == labels[1] != labels[2] == labels[3]
        assert all(m.sum() == 1 for m in state.membership.values())

    def test_compared(self):
        # two pairs of opposite directions: distances within 0, between 2: every silhouette is 1
        reports = {f"c{i}": sent(v) for i, v in enumerate([EAST, EAST, WEST, WEST])}
        figures = stage(report_baselines=True).fold(zeros(), reports, 0).round_metrics
        kinds = ("silhouette", "kmeans_silhouette", "hierarchical_silhouette")
        assert [figures[f"train.{k}"] for k in kinds] == pytest.approx([1.0, 1.0, 1.0])


class TestServed:
    state = replace(zeros(3), membership={"a": torch.tensor([1.0, 0.0, 1.0]), "b": torch.tensor([0.0, 1.0, 0.0])})

    def test_all_ones_experts_by_their_rank(self):
        found = experts_for(self.state, "a")
        assert [m["head.bias"][0].item() for m in found.values()] == [0.0, 2.0]
        assert list(found) == ["expert-000", "expert-001"]
        assert list(experts_for(self.state, "b")) == ["expert-000"]

    def test_a_client_without_a_cluster_receives_all_models(self):
        assert len(experts_for(self.state, None)) == len(experts_for(self.state, "new")) == 3


class TestSketch:
    def test_small_updates_are_not_sketched(self):
        assert update_direction(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
        assert update_direction(torch.zeros(3)).tolist() == [0.0] * 3

    def test_a_large_one_keeps_cosines(self, monkeypatch):
        monkeypatch.setattr(overlapping, "SKETCH_SIZE", 4096)
        overlapping._buckets.cache_clear()
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(6, 50_000, generator=g) + 2 * torch.randn(1, 50_000, generator=g)
        exact = F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T
        kept = torch.stack([update_direction(row) for row in rows])
        assert kept.shape == (6, 4096)
        assert (kept @ kept.T - exact).abs().max() < 4 / 64  # four times 1 / sqrt(4096)
        assert torch.equal(update_direction(2 * rows[0]), kept[0])
        overlapping._buckets.cache_clear()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_clusters", 0),
        ("explained_variance", 0.0),
        ("explained_variance", 1.5),
        ("every_rounds", -1),
        ("threshold", -2.0),
    ],
)
def test_refuses(key, value):
    with pytest.raises(UserError, match=f"{key} is {value}"):
        OverlapRule(**{key: value})


class Listening(PlainFleet):
    def execute(self, plan):
        self.plans = [*getattr(self, "plans", []), plan]
        return super().execute(plan)


def test_experts_that_did_not_change_are_not_sent():
    """100 clients with two of 10 experts each: after a round in which one client trained, no client receives an expert
    but those who share one with it."""
    from federations import tiny_federation

    federation = tiny_federation(100)
    short = {"gate": {"epochs": 1}, "personal": {"epochs": 1}}
    model = load_model("mlp", (6,), 4)
    method = build("scmoe", Setting(model, rounds=9, cohort_size=100, batch_size=64, epochs=1, options=short))
    member = {
        c: torch.from_numpy(np.isin(np.arange(10), [i % 10, (i + 1) % 10])).float() for i, c in enumerate(federation)
    }
    models = {f"expert-{k:03d}": load_model("mlp", (6,), 4).init(k) for k in range(10)}
    gates = replace(method, stages=method.stages[-1:])
    fleet = Listening(federation)
    first = engine.run(gates, fleet, rounds=1, seed=0, state=ServerState(0, models, member))
    everybody = first.rounds[-1].bytes_down
    changed = {k: tree.map_leaves(lambda x: x + 1, m) if k == "expert-003" else m for k, m in models.items()}
    state = replace(first.state, models=changed)
    second = engine.run(gates, fleet, rounds=2, seed=0, state=state, earlier_rounds=first.rounds)
    tasks = fleet.plans[-2].tasks  # the last plan is the evaluation's
    affected = {c for c in federation if member[c][3]}
    assert {c for c, t in tasks.items() if len(t.cached) < 2} == affected
    assert len(affected) == 20
    size = sum(x.numel() * 4 for x in models["expert-000"].values())
    assert second.rounds[-1].bytes_down < 20 * size + 100 * 1000  # what is held costs a message without a model
    assert everybody > 200 * size
    third = engine.run(gates, fleet, rounds=3, seed=0, state=second.state, earlier_rounds=second.rounds)
    assert all(t.cached == t.models.keys() for t in fleet.plans[-2].tasks.values())
    assert third.rounds[-1].bytes_down < 100 * 1000
