"""FedClusterEnsemble: clusters of the first round's models, members in turn, and the most confident model predicts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation
from torch import nn
from torch.nn import functional as F

import shoal
from shoal import engine, tree
from shoal.client.confidence import (
    EXTRACTOR,
    ROUTER,
    Confidence,
    ensemble_logits,
    fit_discriminant,
    log_densities,
    mask_absent_classes,
)
from shoal.client.feature_moments import ComputeFeatureMoments
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.feature_moments import CollectFeatureMoments
from shoal.stages.first_round_clusters import FIRST_MODEL_SLOT
from shoal.stages.select import SelectRoundRobin
from shoal.types import Plan, Report, Samples, ServerState, Task

MLP = load_model("mlp", (6,), 4)


def setting(options=None, **kw):
    return Setting(**{"model": MLP, "rounds": 8, "cohort_size": 6, "batch_size": 8, "options": options or {}} | kw)


def clustered_federation(clients=6, rows=40):
    """Even clients have classes 0 and 1, odd ones 2 and 3, which makes two clusters."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(4, 6, generator=g)

    def draw(count, classes):
        y = torch.tensor(classes)[torch.randint(0, len(classes), (count,), generator=g)]
        return Samples(torch.randn(count, 6, generator=g) + centres[y], y)

    data = {f"c{i}": {s: draw(rows, [[0, 1], [2, 3]][i % 2]) for s in ("train", "test")} for i in range(clients)}
    return shoal.Federation.from_clients(data, draw(200, [0, 1, 2, 3]), tuple("0123"))


class PartlyAbsentFleet(PlainFleet):
    """A fleet in which some clients do not respond in training, or are absent."""

    def __init__(self, data, silent=(), away=()):
        super().__init__(data)
        self.silent, self.away = set(silent), set(away)

    def roster(self):
        return tuple(c for c in super().roster() if c not in self.away)

    def execute(self, plan):
        return {c: r for c, r in super().execute(plan).items() if c not in self.silent}


def run_method(method, fleet, rounds, state=None, seed=0):
    return engine.run(method, fleet, rounds=rounds, seed=seed, state=state)


class TestRules:
    # Three models, two samples, two classes. For the first sample the second model has the largest logit, 5, and the
    # third model the largest probability, because 3 - (-3) = 6 is the widest margin.
    logits = torch.tensor([[[1.0, 0.0], [9.0, 8.0]], [[5.0, 4.0], [0.0, 7.0]], [[-3.0, 3.0], [0.0, 1.0]]])

    @pytest.mark.parametrize(
        ("rule", "experts", "classes"),
        [
            ("logit", [1, 0], [0, 0]),
            ("probability", [2, 1], [1, 1]),
            ("energy", [1, 0], [0, 0]),  # ln(e^5 + e^4) = 5.3; ln(e^9 + e^8) = 9.3
        ],
    )
    def test_the_most_confident_model_predicts(self, rule, experts, classes):
        combined = Confidence(rule).combine(self.logits)
        assert combined.model_index.tolist() == experts
        assert combined.logits.argmax(-1).tolist() == classes
        for row, k in enumerate(experts):
            assert torch.equal(combined.logits[row], self.logits[k, row])

    def test_confidences_by_hand(self):
        assert Confidence("logit").combine(self.logits).confidence.tolist() == [5.0, 9.0]
        assert Confidence("energy").combine(self.logits).confidence[0] == pytest.approx(np.log(np.exp(5) + np.exp(4)))
        assert Confidence("probability").combine(self.logits).confidence[0] == pytest.approx(1 / (1 + np.exp(-6)))

    def test_the_largest_logit_is_that_of_the_flat_table(self):
        """Algorithm 3 is the argmax over models and classes, modulo classes."""
        logits = torch.randn(4, 50, 10, generator=torch.Generator().manual_seed(1))
        flat = logits.transpose(0, 1).flatten(1).argmax(-1)
        combined = Confidence().combine(logits)
        assert torch.equal(combined.logits.argmax(-1), flat % 10)
        assert torch.equal(combined.model_index, flat // 10)

    def test_all_models_predict_together(self):
        # Votes for the first sample are 0, 0, 1; probabilities of class 0: .731, .731, .002, mean .488
        assert Confidence("majority").combine(self.logits).logits.argmax(-1).tolist() == [0, 1]
        combined = Confidence("average").combine(self.logits)
        assert combined.logits[0].exp()[0] == pytest.approx((2 / (1 + np.exp(-1)) + 1 / (1 + np.exp(6))) / 3)
        assert combined.logits.argmax(-1).tolist() == [1, 1]
        assert combined.model_index.tolist() == [2, 1]  # the most confident model of the predicted class

    def test_of_equal_votes_the_larger_mean(self):
        logits = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]])
        assert Confidence("majority").combine(logits).logits.argmax(-1).tolist() == [1]

    @pytest.mark.parametrize("rule", ["logit", "probability", "energy", "density", "average", "majority"])
    def test_a_single_model_predicts_by_every_rule(self, rule):
        logits = torch.randn(1, 30, 10, generator=torch.Generator().manual_seed(2))
        combined = Confidence(rule).combine(logits)
        assert torch.equal(combined.logits.argmax(-1), logits[0].argmax(-1))
        assert not combined.model_index.any()

    def test_masked_classes_are_never_chosen(self):
        held = torch.tensor([[True, False], [False, True], [True, True]])
        combined = mask_absent_classes(self.logits, held)
        assert combined.argmax(-1).tolist() == [[0, 0], [1, 1], [1, 1]]
        assert bool(combined.isfinite().all())
        assert torch.equal(combined[2], self.logits[2])

    def test_densities_decide_and_logits_count_beside_them(self):
        densities = torch.tensor([[0.0, 0.0], [-3.0, 0.0], [-9.0, -9.0]])
        assert Confidence("density", logit_weight=0.5).combine(self.logits, densities).model_index.tolist() == [0, 0]
        assert Confidence("density", logit_weight=1.0).combine(self.logits, densities).model_index.tolist() == [1, 0]
        score = Confidence("density", logit_weight=0.0).combine(self.logits, densities).confidence
        assert score[1] == pytest.approx(1 / (2 + np.exp(-9)))

    @pytest.mark.parametrize("model", ["mlp", "networks:SmallConvolution"])
    def test_ensemble_logits_are_those_of_each_model(self, model):
        net = load_model(model, (1, 6, 6), 4)
        models = {f"expert-{k:03d}": net.init(k) for k in (2, 0, 1)}
        for rows in (3, 300):
            x = torch.randn(rows, 1, 6, 6, generator=torch.Generator().manual_seed(0))
            each = torch.stack([net.predict(models[k], x) for k in sorted(models)])
            torch.testing.assert_close(ensemble_logits(net, models, x), each)

    @pytest.mark.parametrize(
        ("option", "sentence"),
        [
            ({"logit_weight": -1}, "serve.logit_weight is -1"),
            ({"ridge": 0}, "serve.ridge is 0"),
            ({"covariance_shrinkage": 2}, "serve.covariance_shrinkage is 2"),
            ({"max_features": 0}, "serve.max_features is 0"),
            ({"rule": "loudest"}, "option serve.rule is 'loudest'"),
        ],
    )
    def test_bad_options(self, option, sentence):
        with pytest.raises(UserError, match=sentence):
            build("fce", setting({"serve": option}))


class TestDensities:
    def moments(self):
        """Two clusters on a line of features (x, 0): one with classes around 0 and 4, the other around 10."""
        rows = [
            torch.tensor([[-1.0, 1.0], [1.0, -1.0], [3.0, 1.0], [5.0, -1.0]]),
            torch.tensor([[9.0, 1.0], [11.0, -1.0]]),
        ]
        counts = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
        means = torch.zeros(2, 3, 2)
        means[0, :2] = torch.tensor([[0.0, 0.0], [8.0, 0.0]]) / 4
        means[1, 2] = torch.tensor([20.0, 0.0]) / 2
        return {"count": counts, "mean": means, "square": torch.stack([h.T @ h / len(h) for h in rows])}

    def test_by_hand(self):
        # within classes x and y have variance 1 and covariance -1 everywhere; ridge 1 makes it [[2, -1], [-1, 2]], of
        # determinant 3, with the inverse [[2, 1], [1, 2]] / 3; (6, 0) is at 4 * 2/3 from class 1, 36 * 2/3 from class 0
        # and 16 * 2/3 from class 2
        router = fit_discriminant(self.moments(), shrinkage=0.5, ridge=1.0)
        found = log_densities(router, torch.tensor([[6.0, 0.0]]))[:, 0]
        half = 0.5 * np.log(3)
        assert found[0] == pytest.approx(np.log(np.exp(-4 / 3) + np.exp(-12)) - half, abs=1e-5)
        assert found[1] == pytest.approx(-16 / 3 - half, abs=1e-5)

    def test_a_class_without_samples_in_a_cluster_has_no_density(self):
        """The empty class's centre would be at the origin."""
        router = fit_discriminant(self.moments(), shrinkage=0.0, ridge=1.0)
        assert log_densities(router, torch.zeros(1, 2)).argmax(0).tolist() == [0]
        assert log_densities(router, torch.tensor([[10.0, 0.0]])).argmax(0).tolist() == [1]

    def test_members_report_their_moments(self):
        federation = tiny_federation(1)
        program, params = ComputeFeatureMoments(MLP, 256), MLP.init(3)
        (report,) = PlainFleet(federation).execute(Plan(program, {"c0": Task({"m": params})})).values()
        x, y = federation["c0"]["train"]
        hidden = F.relu(F.linear(x, params["fc1.weight"], params["fc1.bias"]))
        h = torch.cat([hidden, F.relu(F.linear(hidden, params["fc2.weight"], params["fc2.bias"]))], 1)
        moments = report.tensors["moments"]
        assert moments["count"].tolist() == y.bincount(minlength=4).tolist()
        torch.testing.assert_close(moments["mean"], torch.stack([h[y == c].sum(0) for c in range(4)]) / len(y))
        torch.testing.assert_close(moments["square"], h.T @ h / len(y))

    def test_reported_moments_add_up_in_any_order(self):
        federation = clustered_federation(4)
        program = ComputeFeatureMoments(MLP, 256)
        tasks = {c: Task({"m": MLP.init(3)}) for c in federation}
        reports = PlainFleet(federation).execute(Plan(program, tasks))
        state = ServerState(0, {}, membership={c: torch.eye(2)[i % 2] for i, c in enumerate(federation)})
        stage = CollectFeatureMoments(program)
        at_once = stage.fold(state, reports, 0)
        one_by_one = state
        for c in ("c2", "c0", "c3", "c1"):
            one_by_one = stage.fold(one_by_one, {c: reports[c]}, 0)
        a, b = (s.memory["describe"]["moments"] for s in (at_once, one_by_one))
        assert tree.max_abs_difference(a, b) < 1e-5
        x = torch.cat([federation[c]["train"].x for c in ("c1", "c3")])
        h = MLP.features(MLP.init(3), x, 256)
        torch.testing.assert_close(a["square"][1], h.T @ h / len(h))

    def test_features_are_those_of_the_last_layers_that_fit(self):
        x = torch.randn(3, 6)
        assert MLP.features(MLP.init(0), x, 94).shape == (3, 94)
        assert MLP.features(MLP.init(0), x, 93).shape == (3, 30)
        assert MLP.features(MLP.init(0), x, 1).shape == (3, 30)
        net = load_model("cnn-cifar", (3, 32, 32), 4)
        assert net.features(net.init(0), torch.randn(2, 3, 32, 32), 256).shape == (2, 32 + 64 + 64 + 64)

    def test_a_network_without_relu_is_refused_before_any_client_is_queried(self):
        method = build("fce", setting({"serve": {"rule": "density"}}, model=load_model("linear", (6,), 4)))
        with pytest.raises(UserError, match="has no ReLU"):
            method.init(0)


class TestMethod:
    def test_clusters_are_found_and_trained_separately(self):
        federation = clustered_federation()
        result = run_method(build("fce", setting()), PlainFleet(federation), 6)
        assert result.clusters == {f"c{i}": [f"expert-00{i % 2}"] for i in range(6)}
        assert result.accuracy["local"] > 0.9
        assert [r.metrics["train.updates"] for r in result.rounds] == [6, 4, 4, 4, 4, 4]  # round(.7 * 3) of each
        assert result.rounds[0].metrics["cluster.num_clusters"] == 2
        assert result.rounds[0].metrics["cluster.noise"] == 0
        assert "cluster.noise" not in result.rounds[1].metrics

    def test_the_first_models_are_means_weighted_by_samples(self):
        federation = tiny_federation(4)
        method = build("fce", setting({"cluster": {"radius": 100.0}}))  # one cluster
        result = run_method(method, PlainFleet(federation), 1)
        plan = method.stages[1].plan(
            replace(method.init(0), cohort=tuple(federation)), engine.derive_seed(0, 0, "train")
        )
        reports = PlainFleet(federation).execute(plan)
        rows = [len(federation[c]["train"].y) for c in federation]
        expected = tree.weighted_mean([reports[c].tensors["model"] for c in federation], rows)
        assert tree.max_abs_difference(result.state.models["expert-000"], expected) < 1e-6

    def test_one_client_of_each_in_turn_and_its_model_is_the_clusters(self):
        federation = clustered_federation()
        method = build("fce", setting({"select": {"per_cluster": "one"}}))
        state = run_method(method, PlainFleet(federation), 1).state
        for number, pair in enumerate([("c0", "c1"), ("c2", "c3"), ("c4", "c5"), ("c0", "c1")]):
            fleet = RecordingFleet(federation)
            state = run_method(method, fleet, number + 2, state).state
            assert tuple(fleet.sent) == pair
            for place, client in enumerate(pair):
                model, sent = state.models[f"expert-00{place}"], fleet.sent[client].tensors["model"]
                assert all(torch.equal(model[k], sent[k]) for k in sent)

    def test_with_one_cluster_a_fraction_of_it_is_selected(self):
        options = {"select": {"per_cluster": "one"}, "cluster": {"radius": 100.0}}
        result = run_method(build("fce", setting(options)), PlainFleet(clustered_federation()), 3)
        assert len(result.state.models) == 1
        assert [r.cohort_size for r in result.rounds] == [6, 4, 4]

    def test_all_clients_train_before_any_client_trains_twice(self):
        fleet = RecordingFleet(clustered_federation(6))
        run_method(build("fce", setting({"select": {"cluster_fraction": 0.34}})), fleet, 4)
        assert fleet.order[6:] == ["c0", "c1", "c2", "c3", "c4", "c5"]

    def test_a_client_without_a_first_report_joins_by_its_update_of_the_first_model(self):
        federation = clustered_federation()
        method = build("fce", setting())
        state = run_method(method, PartlyAbsentFleet(federation, silent=["c4", "c5"]), 1).state
        assert set(state.membership) == {"c0", "c1", "c2", "c3"}
        assert len(method.models_for(state, "c5")) == 2  # served by all until then
        first = method.init(0).models["expert-000"]
        fleet = RecordingFleet(federation)
        after = run_method(method, fleet, 2, state)
        assert {"c4", "c5"} < set(fleet.sent)
        assert tree.max_abs_difference(fleet.asked["c4"].models["expert"], first) == 0
        assert after.clusters["c4"] == ["expert-000"]
        assert after.clusters["c5"] == ["expert-001"]
        # A model that starts from the first weights is averaged into no cluster model.
        others = [c for c in fleet.sent if c in ("c0", "c2")]
        expected = tree.weighted_mean([fleet.sent[c].tensors["model"] for c in others], [1.0] * len(others))
        assert tree.max_abs_difference(after.state.models["expert-000"], expected) < 1e-6

    def test_late_joining_clients_are_last_in_turn(self):
        federation = clustered_federation(8)
        method = build("fce", setting({"select": {"per_cluster": "one"}}))
        state = run_method(method, PartlyAbsentFleet(federation, away=["c6", "c7"]), 1).state
        fleet = RecordingFleet(federation)
        run_method(method, fleet, 6, state)
        evens = [c for c in fleet.order if int(c[1]) % 2 == 0]
        assert evens == ["c0", "c6", "c2", "c4", "c0", "c6"]  # c6 joins in the second round, behind c0

    def test_an_absent_client_does_not_delay_others(self):
        federation = clustered_federation()
        method = build("fce", setting({"select": {"per_cluster": "one"}}))
        state = run_method(method, PlainFleet(federation), 1).state
        fleet = RecordingFleet(federation)
        fleet._roster = ("c1", "c2", "c3", "c4", "c5")
        run_method(method, fleet, 4, state)
        assert [c for c in fleet.order if int(c[1]) % 2 == 0] == ["c2", "c4", "c2"]

    def test_a_first_round_without_reports_is_tried_again(self):
        federation = clustered_federation()
        method = build("fce", setting())
        state = run_method(method, PartlyAbsentFleet(federation, silent=federation), 1).state
        assert not state.membership
        result = run_method(method, PlainFleet(federation), 2, state)
        assert len(result.clusters) == 6

    def test_a_client_without_samples_is_in_no_cluster_and_not_selected_again(self):
        federation = clustered_federation()
        method = build("fce", setting())
        stage = method.stages[1]
        state = replace(method.init(0), cohort=tuple(federation), roster=tuple(federation))
        reports = dict(PlainFleet(federation).execute(stage.plan(state, 0)))
        reports["c5"] = replace(reports["c5"], counts={"train": 0})
        after = stage.fold(state, reports, 0)
        assert "c5" not in after.membership
        assert "c5" not in SelectRoundRobin().fold(replace(after, round=1), {}, 0).cohort
        assert len(method.models_for(after, "c5")) == 2

    def test_a_client_is_served_its_clusters_model_by_name(self):
        federation = clustered_federation()
        method = build("fce", setting())
        state = run_method(method, PlainFleet(federation), 2).state
        assert list(method.models_for(state, "c3")) == ["expert-001"]
        assert list(method.models_for(state, None)) == ["expert-000", "expert-001"]
        x = federation.central.x
        known, unseen = (method.predict_routed(method.models_for(state, c), {}, x) for c in ("c3", None))
        assert not known.model_index.any()
        assert set(unseen.model_index.tolist()) == {0, 1}
        assert torch.equal(method.predict(method.models_for(state, None), {}, x), unseen.logits)

    def test_the_router_knows_the_cluster_of_samples(self):
        federation = clustered_federation()
        method = build("fce", setting({"serve": {"rule": "density"}}))
        result = run_method(method, PlainFleet(federation), 3)
        models = method.models_for(result.state, None)
        assert set(models) == {"expert-000", "expert-001", EXTRACTOR, ROUTER}
        answer = method.predict_routed(models, {}, federation.central.x)
        assert (answer.model_index == (federation.central.y > 1)).float().mean() > 0.97
        assert sum(r.metrics["train.updates"] for r in result.rounds) == 14  # a report of moments is no update
        again = run_method(method, VectorFleet(federation), 3)
        assert tree.max_abs_difference(result.state.memory["describe"], again.state.memory["describe"]) < 1e-4
        # The mean of the first round is weighted by samples, and all clients have equally many.
        fleet = RecordingFleet(federation)
        run_method(method, fleet, 1)
        mean = tree.weighted_mean([fleet.trained[c].tensors["model"] for c in federation], [1.0] * 6)
        assert tree.max_abs_difference(models[EXTRACTOR], mean) < 1e-6

    def test_without_statistics_of_every_cluster_logits_decide(self):
        federation = clustered_federation()
        method = build("fce", setting({"serve": {"rule": "density"}}))
        state = run_method(method, PlainFleet(federation), 1).state
        moments = {k: x.clone() for k, x in state.memory["describe"]["moments"].items()}
        moments["count"][1] = 0
        state = replace(state, memory={**state.memory, "describe": {"moments": moments}})
        assert ROUTER not in method.models_for(state, None)

    @pytest.mark.parametrize("mask", ["inferred", "reported"])
    def test_the_server_knows_which_classes_a_cluster_holds(self, mask):
        federation = clustered_federation()
        method = build("fce", setting({"serve": {"mask": mask}}))
        state = run_method(method, PlainFleet(federation), 2).state
        models = method.models_for(state, None)
        assert models[ROUTER]["mask"].tolist() == [[True, True, False, False], [False, False, True, True]]
        answer = method.predict_routed(models, {}, federation.central.x)
        assert torch.equal(answer.model_index, (answer.logits.argmax(-1) > 1).long())

    def test_diverged_models_are_refused_by_the_engine(self):
        method = build("fce", setting(lr=1e30))
        with pytest.raises(UserError, match="training diverged"):
            run_method(method, PlainFleet(clustered_federation()), 2)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"select": {"cluster_fraction": 0.0}}, "select.cluster_fraction is 0.0"),
            ({"cluster": {"radius": 0.0}}, "cluster.radius is 0.0"),
            ({"cluster": {"min_size": 0}}, "cluster.min_size is 0"),
        ],
    )
    def test_bad_options(self, options, sentence):
        with pytest.raises(UserError, match=sentence):
            build("fce", setting(options))


class RecordingFleet(PlainFleet):
    """Keeps the tasks and the reports of training."""

    def __init__(self, data):
        super().__init__(data)
        self.order, self.sent, self.asked, self.trained = [], {}, {}, {}

    def execute(self, plan):
        reports = super().execute(plan)
        if plan.program.name == "train":
            self.order += list(plan.tasks)
            self.asked, self.sent = dict(plan.tasks), dict(reports)
            self.trained |= reports
        return reports


@pytest.mark.parametrize(
    ("per_cluster", "clients", "total"), [("fraction", 10, 423), ("fraction", 20, 846), ("fraction", 30, 1269)]
)
def test_updates_of_sixty_rounds(per_cluster, clients, total):
    """n + 59 times the fraction of each cluster: 4 + 3 + 3, 7 + 7 + 6, 10 + 10 + 10 members."""
    assert clients + 59 * cohort_size(per_cluster, clients) == total


@pytest.mark.parametrize(("clients", "rounds", "total"), [(10, 60, 187), (20, 60, 197), (30, 60, 207), (30, 30, 117)])
def test_updates_of_one_client_in_turn(clients, rounds, total):
    assert clients + (rounds - 1) * cohort_size("one", clients) == total


def cohort_size(per_cluster, clients):
    names = [f"c{i:02d}" for i in range(clients)]
    groups = np.repeat(np.arange(3), [len(part) for part in np.array_split(np.arange(clients), 3)])
    membership = {c: torch.eye(3)[k] for c, k in zip(names, groups.tolist(), strict=True)}
    models = {f"expert-00{k}": {} for k in range(3)}
    state = ServerState(1, models, membership=membership, roster=tuple(names))
    return len(SelectRoundRobin(per_cluster=per_cluster).fold(state, {}, 0).cohort)


def test_batch_norm_and_buffers_belong_to_cluster_models():
    federation = tiny_federation(5, (1, 6, 6))
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    assert model.uses(nn.modules.batchnorm._BatchNorm)
    result = run_method(build("fce", setting({"serve": {"rule": "density"}}, model=model)), PlainFleet(federation), 2)
    assert set(result.state.models["expert-000"]) == set(model.init(0))


def test_a_late_joining_client_trains_at_the_rate_of_the_first_round():
    """Its last layer is compared with those of the first round. With a lower rate it would stay near the first ones."""
    stage = build("fce", Setting(MLP, 40, 3, options={"train": {"schedule": "cosine"}})).stages[1]
    first = MLP.init(0)
    member = {"a": torch.tensor([1.0])}
    memory = {FIRST_MODEL_SLOT: {"seed": torch.tensor(0)}}
    state = ServerState(30, {"expert-000": first}, member, roster=("a", "b"), cohort=("a", "b"), memory=memory)
    rates = {c: task.config["lr"] for c, task in stage.plan(state, 0).tasks.items()}
    assert rates["b"] == pytest.approx(0.1)
    assert rates["a"] < 0.05


def test_a_late_joining_client_that_diverged_does_not_block_others():
    stage = build("fce", Setting(MLP, 40, 3)).stages[1]
    models = {c: MLP.init(k) for k, c in enumerate("abcd")}
    told = {c: Report({"model": m}, {"loss": (1.0, 1.0)}, {"train": 5}) for c, m in models.items()}
    begun = ServerState(0, {"expert-000": MLP.init(9)}, roster=tuple("ab"), cohort=tuple("ab"))
    state = stage.fold(begun, {c: told[c] for c in "ab"}, 0)
    broken = {k: torch.full_like(x, torch.nan) for k, x in models["c"].items()}
    after = stage.fold(state, {"c": replace(told["c"], tensors={"model": broken}), "d": told["d"]}, 0)
    assert set(after.membership) == {"a", "b", "d"}


def test_moments_are_of_the_samples_that_are_trained_on():
    options = {"train": {"sensitivity": "low"}, "serve": {"rule": "density", "mask": "reported"}}
    method = build("fce", Setting(MLP, 4, 3, options=options))
    assert {phase.split for program in method.programs.values() for phase in program.phases} == {"train/low"}


class Recurrent(nn.Module):
    """A network that torch cannot stack."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.steps, self.last = nn.GRU(1, 4, batch_first=True), nn.Linear(4, classes)

    def forward(self, x):
        return self.last(self.steps(x.flatten(1)[..., None])[0][:, -1])


def test_networks_that_cannot_be_stacked_predict_one_after_the_other():
    model = load_model(f"{__name__}:Recurrent", (6,), 3)
    models = {f"expert-{k:03d}": model.init(k) for k in range(2)}
    x = torch.randn(5, 6)
    with torch.no_grad():
        found = ensemble_logits(model, models, x)
        assert torch.allclose(found[1], model.predict(models["expert-001"], x))
