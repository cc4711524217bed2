"""A probe for shift, experts beside a global model, and the gate over them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation

from shoal import engine, tree
from shoal.bench import arrange, make_fleet
from shoal.client.train import LocalTraining
from shoal.clusterers.bisecting import bisected, unexplained
from shoal.job import Job
from shoal.models import load_model
from shoal.stages.beside import FederateBeside, trained_beside
from shoal.stages.shift import ShiftProbe
from shoal.stages.train import Rate
from shoal.table import Table
from shoal.types import Report, ServerState

SPLIT = {"probe": {"at": 1, "threshold": -1.0, "smallest": 1}, "gate": {"epochs": 2}}


class TestBisected:
    TWO = np.array([[1, 0.1, 0], [1, 0, 0.1], [1, -0.1, 0], [-1, 0.1, 0], [-1, 0, 0.1], [-1, -0.1, 0]])

    def test_two_ways(self):
        labels, silhouette = bisected(self.TWO, 0.05, 2, 2, 0)
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert silhouette > 0.9

    def test_no_ways(self):
        """Directions in as many dimensions as there are clients, all at right angles: every distance is 1."""
        labels, silhouette = bisected(np.eye(8), 0.05, 2, 2, 0)
        assert labels.tolist() == [0] * 8
        assert silhouette <= 0.0 + 1e-9

    def test_a_few_are_no_group(self):
        rows = np.vstack([self.TWO[:3], self.TWO[3:4]])
        assert bisected(rows, 0.05, 2, 2, 0).labels.tolist() == [0, 0, 0, 0]

    def test_four_ways(self):
        rows = np.repeat(np.eye(4), 3, axis=0) + 0.01 * np.random.default_rng(0).normal(size=(12, 4))
        assert bisected(rows, 0.05, 3, 4, 0).labels.tolist() == np.repeat(np.arange(4), 3).tolist()
        assert bisected(rows, 0.05, 3, 2, 0).labels.max() == 1

    def test_order_scale_and_inputs(self):
        order, before = np.array([5, 0, 3, 1, 4, 2]), self.TWO.copy()
        labels = bisected(7 * self.TWO[order], 0.05, 2, 2, 0).labels
        assert labels.tolist() == [0, 1, 0, 1, 0, 1]
        assert np.array_equal(self.TWO, before)

    @pytest.mark.parametrize("rows", [[[1.0, 2.0]], np.ones((6, 2)), np.zeros((6, 2))])
    def test_nothing_to_divide(self, rows):
        assert bisected(rows, 0.05, 1, 2, 0).labels.max() == 0


class TestUnexplained:
    def test_by_hand(self):
        """Clients of class 0 went (1, 0) and (0.6, 0.8), one of class 1 (0, 1): less their classes' means, (0.8, 0.4)
        and (0, 1)."""
        rows, known = np.array([[2.0, 0.0], [3.0, 4.0], [0.0, 7.0]]), np.array([[1.0, 0], [1, 0], [0, 1]])
        np.testing.assert_allclose(unexplained(rows, known), [[0.2, -0.4], [-0.2, 0.4], [0, 0]], atol=1e-12)
        assert rows[0].tolist() == [2, 0]

    def test_of_whom_nothing_is_known_nothing_is_taken_away(self):
        rows = np.array([[3.0, 4.0], [0.0, 0.0]])
        np.testing.assert_allclose(unexplained(rows, np.zeros((2, 3))), [[0.6, 0.8], [0, 0]])


def probed(ways, labels=None, before=None, **keys):
    """Clients who went these ways, from a model of two zeros."""
    first = {"w": torch.zeros(2)}
    clients = [f"c{i}" for i in range(len(ways))]
    rows = {
        c: {"labels": torch.tensor(p), "size": torch.tensor(5)} for c, p in zip(clients, labels or [], strict=False)
    }
    start = ServerState(20, {"global": first}, roster=tuple(clients), memory={"represent": Table.of(rows).tree()})
    stage = ShiftProbe(LocalTraining(load_model("linear", (1,), 2)), ("w",), **{"smallest": 2} | keys)
    reports = {
        c: Report({"model": {"w": torch.tensor(w)}}, {}, {"train": 5}) for c, w in zip(clients, ways, strict=True)
    }
    return stage.fold(before or start, reports, 0)


WAYS = [[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1], [-1.0, 0.0]]


class TestProbe:
    def test_ways_apart_have_experts(self):
        after = probed(WAYS)
        assert sorted(after.models) == ["expert-000", "expert-001", "global"]
        assert [int(after.membership[f"c{i}"].argmax()) for i in range(6)] == [0, 0, 0, 1, 1, 1]
        assert after.figures["probe.groups"] == 2
        ways = after.memory["probe"]["directions"]
        assert ways[0, 0] > 0.9 and ways[1, 0] < -0.9

    def test_ways_that_labels_explain_have_none(self):
        """The same ways, but whoever goes one way holds one class: what is left is at right angles to them."""
        labels = [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3
        assert probed(WAYS, labels=labels, threshold=0.9).figures["probe.groups"] == 1
        mixed = [[1.0, 0.0], [0.0, 1.0]] * 3
        assert probed(WAYS, labels=mixed, threshold=0.5).figures["probe.groups"] == 2

    def test_one_way_has_none(self):
        assert list(probed([w for w in WAYS if w[0] > 0] * 2, threshold=0.9).models) == ["global"]

    def test_when(self):
        program = LocalTraining(load_model("linear", (1,), 2))
        assert [r for r in range(60) if ShiftProbe(program, ()).due(r)] == [20]
        assert [r for r in range(60) if ShiftProbe(program, (), at=5, every=20).due(r)] == [5, 25, 45]

    def test_who_drifted_moves_and_experts_stay_with_the_others(self):
        first = probed(WAYS)
        grown = {k: {"w": torch.full((2,), float(i))} for i, k in enumerate(sorted(first.models))}
        turned = [[-1.0, 0.05], *WAYS[1:]]
        here = {c: m["w"] for c, m in zip("012", [grown[k] for k in sorted(grown)], strict=True)}
        ways = [(here["2"] + torch.tensor(w)).tolist() for w in turned]
        after = probed(ways, before=replace(first, models=grown))
        assert [int(after.membership[f"c{i}"].argmax()) for i in range(6)] == [1, 0, 0, 1, 1, 1]
        assert tree.distance(after.models, grown) == 0

    def test_nobody_and_who_diverged(self):
        state = ServerState(20, {"global": {"w": torch.zeros(2)}}, roster=("c0",))
        assert probed([], before=state) is state
        assert probed([[float("nan"), 0.0], *WAYS]).membership == {}


class TestBeside:
    def stage(self, head=()):
        program = LocalTraining(load_model("linear", (1,), 2))
        return FederateBeside(program, trained_beside, Rate(0.1, 9), head=head)

    def state(self):
        models = {k: {"w": torch.zeros(2)} for k in ("expert-000", "expert-001", "global")}
        rows = {
            "c0": {"labels": torch.tensor([1.0, 0.0]), "size": torch.tensor(10)},
            "c1": {"labels": torch.tensor([0.5, 0.5]), "size": torch.tensor(30)},
        }
        member = {"c0": torch.tensor([1.0, 0, 0]), "c1": torch.tensor([0, 1.0, 0])}
        return ServerState(0, models, member, memory={"represent": Table.of(rows).tree()})

    def reports(self):
        def of(model, expert, rows):
            tensors = {"model": {"w": torch.tensor(model)}, "expert": {"w": torch.tensor(expert)}}
            return Report(tensors, {}, {"train": rows})

        return {"c0": of([4.0, 4.0], [1.0, 1.0], 10), "c1": of([8.0, 8.0], [2.0, 2.0], 30)}

    def test_all_in_the_global_model_members_in_their_expert(self):
        after = self.stage().fold(self.state(), self.reports(), 0)
        # (10 · 4 + 30 · 8) / 40 = 7
        assert [m["w"].tolist() for _, m in sorted(after.models.items())] == [[1, 1], [2, 2], [7, 7]]

    def test_rows_of_the_last_layer_by_class(self):
        after = self.stage(head=("w",)).fold(self.state(), self.reports(), 0)
        # class 0: 10 rows say 4, 15 say 8: 6.4; class 1: only c1 has any
        assert after.models["global"]["w"].tolist() == pytest.approx([6.4, 8.0])
        # nobody of expert 0 has class 1: averaged as everything else
        assert after.models["expert-000"]["w"].tolist() == [1.0, 1.0]

    def test_what_is_sent(self):
        state = self.state()
        assert list(trained_beside(state, "c1")) == ["global", "expert"]
        assert trained_beside(state, "c1")["expert"] is state.models["expert-001"]
        assert list(trained_beside(state, "new")) == list(trained_beside(state, None)) == ["global"]


def played(fleet, rounds=4, federation=None, **keys):
    federation = federation or tiny_federation(6)
    settings = {"rounds": rounds, "cohort": 3, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4, "fleet": fleet}
    bench = arrange(Job(method="shoal", model="mlp", set=SPLIT, **settings | keys), "shoal", federation)
    private = {}
    result = engine.run(bench.method, make_fleet(bench, private), rounds=rounds, seed=4, central=federation.central)
    return result, private, bench.method


class TestAfterASplit:
    def test_fleets_agree(self):
        (plain, kept, _), (vector, others, _) = played("plain"), played("vector")
        assert len(plain.state.models) == 3
        assert tree.distance(plain.state.models, vector.state.models) < 1e-5
        assert tree.distance(plain.state.membership, vector.state.membership) == 0
        assert tree.distance(kept, others) < 1e-4

    def test_members_have_gates_and_answers_follow_them(self):
        result, private, method = played("plain")
        assert all("gate" in tree_ and "labels" in tree_ for tree_ in private.values())
        models = method.models_for(result.state, "c1")
        assert sorted(models) == ["expert-000", "expert-001", "global", "prior"]
        x = tiny_federation(6)["c1"]["test"].x
        gated = method.predict(models, private["c1"], x)
        without = method.predict(models, {"labels": private["c1"]["labels"]}, x)
        assert not torch.allclose(gated, without)
        moved = {**models, "expert-000": {k: v + 1 for k, v in models["expert-000"].items()}}
        assert torch.allclose(method.predict(moved, private["c1"], x), without), "a gate for other experts"

    def test_an_unseen_client_has_the_global_model_only(self):
        result, _, method = played("plain")
        assert sorted(method.models_for(result.state, None)) == ["global", "prior"]

    def test_who_comes_later_is_served_at_once_and_joins(self):
        result, private, method = played("plain", rounds=2, federation=tiny_federation(5))
        state = result.state
        assert sorted(method.models_for(state, "c5")) == ["global", "prior"]
        federation = tiny_federation(6)
        bench = arrange(
            Job(method="shoal", model="mlp", set=SPLIT, rounds=3, cohort=3, fleet="plain"), "shoal", federation
        )
        later = engine.run(bench.method, make_fleet(bench, private), rounds=3, seed=4, state=state)
        assert "c5" in later.state.membership
        assert len(method.models_for(later.state, "c5")) == 4

    def test_without_a_split_nobody_is_asked_after_the_probe(self):
        federation = tiny_federation(6)
        bench = arrange(
            Job(
                method="shoal",
                model="mlp",
                set={"probe": {"at": 1, "threshold": 1.0}},
                rounds=4,
                cohort=3,
                fleet="plain",
            ),
            "shoal",
            federation,
        )
        result = engine.run(bench.method, make_fleet(bench), rounds=4, seed=4)
        asked = {(p.round, p.stage) for p in result.ledger.pages}
        assert asked == {(1, "represent"), (1, "prior"), (2, "probe"), *((r, "train") for r in (1, 2, 3, 4))}
