"""A probe for shift, experts beside a global model, and the gate over them."""

from dataclasses import replace

import pytest
import torch
from federations import invert_clients, tiny_federation

from shoal import engine, tree
from shoal.client.shift_probe import SumClassFeatures
from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.fleet.plain import PlainFleet
from shoal.models import load_model
from shoal.stages.global_and_experts import AggregateGlobalAndExperts, global_and_own_expert
from shoal.stages.shift_probe import ShiftProbe
from shoal.stages.train import LearningRate
from shoal.types import Report, Samples, ServerState, Task

SPLIT = {"probe": {"first_round": 1, "min_cluster_size": 1}, "gate": {"epochs": 2}}


def moment_reports(clients, shift, rows=40, labels=None, seed=0):
    """Reports on two classes at -1 and 1 in two features. For clients in `shift` the classes are exchanged."""
    g, reports = torch.Generator().manual_seed(seed), {}
    for c in clients:
        y = torch.randint(0, 2, (rows,), generator=g) if labels is None else torch.full((rows,), labels)
        x = 0.5 * torch.randn(rows, 2, generator=g) + (2.0 * y[:, None] - 1) * (-1 if c in shift else 1)
        model = load_model("linear", (2,), 2)
        program, params = SumClassFeatures(model), {"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}
        fleet = PlainFleet({c: {"train": Samples(x, y)}})
        reports[c] = fleet.execute_one(program, c, Task({"global": params}))
    return reports


def shifted(report, by):
    """Changes a report as if all samples of each class were moved by [classes, features]."""
    n, total, square = (report.tensors[k][k] for k in ("count", "sum", "square"))
    square += (2 * by * total.sum(0) + by**2 * n.sum(0)[:, None]).sum(0)
    total += by * n[..., None]


def aside(reports, clients):
    for c in clients:
        shifted(reports[c], torch.tensor([9.0, -9.0]).expand(2, 2))
    return reports


def between(report, share):
    """Changes a report to this fraction of the way from classes at -1 and 1 to classes at 1 and -1."""
    shifted(report, share * torch.tensor([[2.0, 2.0], [-2.0, -2.0]]))


CLIENTS = tuple(f"c{i}" for i in range(8))
FIRST = {"w": torch.zeros(2)}


def probed(shift, state=None, round=20, reported_by=CLIENTS, roster=CLIENTS, **keys):
    stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), **keys)
    state = replace(state or ServerState(0, {"global": FIRST}), round=round, roster=roster, round_metrics={})
    return stage.fold(state, moment_reports(reported_by, shift, seed=round), 0)


def clusters_of(state):
    return {c: int(weights.argmax()) for c, weights in state.membership.items()}


ODD = CLIENTS[1::2]
HALVES = {c: i % 2 for i, c in enumerate(CLIENTS)}


class TestProbe:
    def test_clients_with_different_class_means_have_experts(self):
        after = probed(ODD)
        assert sorted(after.models) == ["expert-000", "expert-001", "global"]
        assert clusters_of(after) == HALVES
        assert after.round_metrics["probe.num_clusters"] == 2 and after.round_metrics["probe.effect"] > 1

    def test_others_have_none(self):
        after = probed(())
        assert list(after.models) == ["global"] and not after.membership
        assert after.round_metrics["probe.num_clusters"] == 1 and abs(after.round_metrics["probe.effect"]) < 0.1

    def test_when_all_clients_are_queried(self):
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), first_round=5, every_rounds=20)
        state = ServerState(0, {"global": FIRST}, roster=("a", "b"))
        asked = [r for r in range(60) if stage.due(r) and stage.plan(replace(state, round=r), 0).tasks]
        assert asked == [5, 25, 45]
        once = replace(stage, every_rounds=0)
        assert [r for r in range(60) if once.due(r) and once.plan(replace(state, round=r), 0).tasks] == [5]

    def test_the_model_of_the_probe_stays_and_is_sent_once(self):
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)))
        after = replace(probed(()), models={"global": {"w": torch.ones(2)}}, round=40, roster=CLIENTS)
        plan = stage.plan(after, 0)
        assert plan.cache_models and plan.tasks["c0"].models["global"]["w"].tolist() == [0, 0]

    def test_a_later_shift_is_found_later(self):
        assert clusters_of(probed(ODD, probed(()), round=40)) == HALVES

    def test_only_the_drifted_client_is_reassigned(self):
        first = probed(ODD)
        grown = {k: {"w": torch.full((2,), float(i))} for i, k in enumerate(sorted(first.models))}
        after = probed(("c0", *ODD), replace(first, models=grown), round=40)
        assert clusters_of(after) == HALVES | {"c0": 1}
        assert after.round_metrics["probe.num_reassigned"] == 1
        assert tree.max_abs_difference(after.models, grown) == 0
        again = probed(("c0", *ODD), after, round=60)
        assert clusters_of(again) == clusters_of(after) and again.round_metrics["probe.num_reassigned"] == 0

    def test_late_clients_are_queried_at_once_and_join(self):
        first = replace(probed(ODD), round=21, roster=(*CLIENTS, "n0", "n1"))
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)))
        assert list(stage.plan(first, 0).tasks) == ["n0", "n1"]
        after = probed(("n1",), first, 21, ("n0", "n1"), first.roster)
        assert clusters_of(after) == HALVES | {"n0": 0, "n1": 1}
        assert not stage.plan(replace(after, round=22, roster=first.roster), 0).tasks

    def test_an_absent_client_keeps_its_cluster_and_one_without_samples_has_none(self):
        after = probed(ODD, probed(ODD), round=40, reported_by=CLIENTS[:6], roster=CLIENTS[:6])
        assert clusters_of(after) == HALVES
        empty = {"e": Report({}, {}, {"train": 0})}
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)))
        noted = stage.fold(replace(after, round=41, roster=(*CLIENTS, "e")), empty, 0)
        assert not stage.plan(noted, 0).tasks

    def test_a_cluster_without_present_members_gets_no_client(self):
        everybody = probed(CLIENTS, probed(ODD), round=40)
        assert set(clusters_of(everybody).values()) == {1}
        joined = probed((), everybody, 41, ("n0",), (*CLIENTS, "n0"))
        assert clusters_of(joined)["n0"] == 1

    def test_a_cluster_is_split_again(self):
        """Two clients go a way that is neither: what is cut off starts as the expert that it is cut off."""
        state, far = probed(ODD), aside(moment_reports(CLIENTS, ODD, seed=40), ("c5", "c7"))
        grown = {k: {"w": torch.full((2,), float(i))} for i, k in enumerate(sorted(state.models))}
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), min_cluster_size=2)
        after = stage.fold(replace(state, models=grown, round=40, roster=CLIENTS), far, 0)
        assert {c: g for c, g in clusters_of(after).items() if g == 2} == {"c5": 2, "c7": 2}
        assert after.models["expert-002"]["w"].tolist() == grown["expert-001"]["w"].tolist() == [1, 1]
        assert after.membership["c0"].tolist() == [1, 0, 0, 0]

    def test_a_split_takes_no_number_of_an_absent_cluster(self):
        """The members of cluster 1 are absent. Two present clients move elsewhere and become cluster 2."""
        state, even = probed(ODD), CLIENTS[0::2]
        grown = {k: {"w": torch.full((2,), float(i))} for i, k in enumerate(sorted(state.models))}
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), min_cluster_size=2)
        reports = aside(moment_reports(even, (), seed=40), ("c4", "c6"))
        after = stage.fold(replace(state, models=grown, round=40, roster=even), reports, 0)
        assert clusters_of(after) == HALVES | {"c4": 2, "c6": 2}
        assert [after.models[f"expert-00{g}"]["w"].tolist() for g in range(3)] == [[0, 0], [1, 1], [0, 0]]
        assert after.round_metrics["probe.num_clusters"] == 3

    def test_the_number_of_an_empty_cluster_is_not_used_again(self):
        """All clients are in cluster 0, and number 1 was used before, so the new cluster is 2."""
        state = probed(ODD)
        grown = {k: {"w": torch.full((2,), float(i))} for i, k in enumerate(sorted(state.models))}
        state = replace(state, models=grown, membership=dict.fromkeys(CLIENTS, state.membership["c0"]))
        after = probed(ODD, state, round=40)
        assert clusters_of(after) == {c: 2 * g for c, g in HALVES.items()}
        assert after.models["expert-002"]["w"].tolist() == grown["expert-000"]["w"].tolist()

    def test_a_split_reassigns_no_client_of_other_clusters_and_counts_all_moves(self):
        """c0 has moved two thirds of the way to the other cluster, too little to switch. c5 and c7 become a cluster."""
        state, far = probed(ODD, min_cluster_size=2), aside(moment_reports(CLIENTS, ODD, seed=40), ("c5", "c7"))
        between(far["c0"], 0.65)
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), min_cluster_size=2)
        after = stage.fold(replace(state, round=40, roster=CLIENTS), far, 0)
        assert clusters_of(after) == HALVES | {"c5": 2, "c7": 2}
        assert after.round_metrics["probe.num_reassigned"] == 2

    def test_always_in_two_whatever_is_seen(self):
        """Without a shift halves do not agree: a threshold is not all that stands against a cut."""
        assert not probed((), min_effect=-1e9, min_cluster_size=1, max_clusters=2).membership
        after = probed((), min_effect=-1e9, min_agreement=-1, min_cluster_size=1, max_clusters=2)
        assert set(clusters_of(after).values()) == {0, 1}

    def test_no_reports_and_values_that_are_not_finite(self):
        state = ServerState(20, {"global": FIRST}, roster=("c0",))
        stage = ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)))
        assert stage.fold(state, {}, 0) is state
        broken = moment_reports(("c0",), ())
        broken["c0"].tensors["sum"]["sum"].fill_(float("nan"))
        assert "probe" not in stage.fold(state, broken, 0).memory

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("first_round", -1),
            ("every_rounds", -1),
            ("min_cluster_size", 0),
            ("max_clusters", 0),
            ("switch_margin", 1),
            ("min_agreement", 2),
        ],
    )
    def test_what_is_refused(self, key, value):
        with pytest.raises(UserError, match=f"probe.{key} is {value}"):
            ShiftProbe(SumClassFeatures(load_model("linear", (2,), 2)), **{key: value})


class TestAggregateGlobalAndExperts:
    def stage(self, head=()):
        program = LocalTraining(load_model("linear", (1,), 2))
        return AggregateGlobalAndExperts(program, global_and_own_expert, LearningRate(0.1, 9), classwise_head=head)

    def state(self):
        models = {k: {"w": torch.zeros(2)} for k in ("expert-000", "expert-001", "global")}
        rows = {
            "c0": {"labels": torch.tensor([1.0, 0.0]), "size": torch.tensor(10)},
            "c1": {"labels": torch.tensor([0.5, 0.5]), "size": torch.tensor(30)},
        }
        member = {"c0": torch.tensor([1.0, 0, 0]), "c1": torch.tensor([0, 1.0, 0])}
        return ServerState(0, models, member, memory={"represent": ClientTable.from_rows(rows).to_tree()})

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
        # class 0: 10 samples report 4, 15 report 8: 6.4; only c1 has class 1
        assert after.models["global"]["w"].tolist() == pytest.approx([6.4, 8.0])
        # no member of expert 0 has class 1: averaged like all other parameters
        assert after.models["expert-000"]["w"].tolist() == [1.0, 1.0]

    def test_what_is_sent(self):
        state = self.state()
        assert list(global_and_own_expert(state, "c1")) == ["global", "expert"]
        assert global_and_own_expert(state, "c1")["expert"] is state.models["expert-001"]
        assert list(global_and_own_expert(state, "new")) == list(global_and_own_expert(state, None)) == ["global"]


def half_inverted(clients):
    return invert_clients(tiny_federation(clients, classes=2), ("c1", "c3", "c5"))


def run_method(fleet, rounds=4, federation=None, **keys):
    federation = federation or half_inverted(6)
    settings = {"rounds": rounds, "cohort": 3, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4, "fleet": fleet}
    bench = assemble(Job(method="shoal", model="mlp", set=SPLIT, **settings | keys), "shoal", federation)
    private = {}
    result = engine.run(
        bench.method, make_fleet(bench, private), rounds=rounds, seed=4, central_samples=federation.central
    )
    return result, private, bench.method


class TestAfterASplit:
    def test_fleets_agree(self):
        (plain, kept, _), (vector, others, _) = run_method("plain"), run_method("vector")
        assert len(plain.state.models) == 3
        assert tree.max_abs_difference(plain.state.models, vector.state.models) < 1e-5
        assert tree.max_abs_difference(plain.state.membership, vector.state.membership) == 0
        assert tree.max_abs_difference(kept, others) < 1e-4

    def test_members_have_gates_that_change_predictions(self):
        result, private, method = run_method("plain")
        assert all("gate" in tree_ and "labels" in tree_ for tree_ in private.values())
        models = method.models_for(result.state, "c1")
        assert sorted(models) == ["expert-000", "expert-001", "global", "prior"]
        x = half_inverted(6)["c1"]["test"].x
        gated = method.predict(models, private["c1"], x)
        without = method.predict(models, {"labels": private["c1"]["labels"]}, x)
        assert not torch.allclose(gated, without)
        moved = {**models, "expert-000": {k: v + 1 for k, v in models["expert-000"].items()}}
        assert torch.allclose(method.predict(moved, private["c1"], x), without), "a gate for other experts"

    def test_an_unseen_client_has_the_global_model_only(self):
        result, _, method = run_method("plain")
        assert sorted(method.models_for(result.state, None)) == ["global", "prior"]

    def test_a_late_client_is_served_at_once_and_joins(self):
        result, private, method = run_method("plain", rounds=2, federation=half_inverted(5))
        state = result.state
        assert sorted(method.models_for(state, "c5")) == ["global", "prior"]
        federation = half_inverted(6)
        bench = assemble(
            Job(method="shoal", model="mlp", set=SPLIT, rounds=3, cohort=3, fleet="plain"), "shoal", federation
        )
        later = engine.run(bench.method, make_fleet(bench, private), rounds=3, seed=4, state=state)
        assert "c5" in later.state.membership
        assert len(method.models_for(later.state, "c5")) == 4

    def test_without_a_split_no_client_is_queried_after_the_probe(self):
        federation = half_inverted(6)
        bench = assemble(
            Job(
                method="shoal",
                model="mlp",
                set={"probe": {"first_round": 1, "min_effect": 1000.0}},
                rounds=4,
                cohort=3,
                fleet="plain",
            ),
            "shoal",
            federation,
        )
        result = engine.run(bench.method, make_fleet(bench), rounds=4, seed=4)
        asked = {(p.round, p.stage) for p in result.ledger.entries}
        assert asked == {(1, "represent"), (1, "prior"), (2, "probe"), *((r, "train") for r in (1, 2, 3, 4))}
