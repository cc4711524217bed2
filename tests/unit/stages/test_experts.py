"""Sparsity vectors, models for clusters, and selection within a time budget."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoal import engine
from shoal.client.sparsity import MeasureSparsity
from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.cost.costs import CostModel
from shoal.cost.devices import PROFILES
from shoal.cost.ledger import Ledger
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.models.model import Model
from shoal.stages.bandit import SelectByBandit, _predecessors
from shoal.stages.cluster import SparsityClusters
from shoal.stages.experts import ClusterModels, count_reassigned, expert_for
from shoal.stages.extract import KeepExtractor
from shoal.stages.query import QueryClients
from shoal.types import Plan, Samples, ServerState, Task


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 6, "cohort_size": 3, "batch_size": 8} | kw)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rectifier, self.last = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(torch.relu(self.rectifier(self.first(x)) - 0.1))


class TestRelus:
    model = Model("named", Named, (3,), 2)

    def test_found_by_index_and_by_name(self):
        assert [self.model.relu_index(layer) for layer in ("last", "1", "2", "rectifier")] == [1, 0, 1, 0]

    def test_outputs(self):
        params, x = self.model.init(0), torch.randn(4, 3)
        hidden = torch.relu(x @ params["first.weight"].T + params["first.bias"])
        assert torch.allclose(self.model.relu_output(params, x, 0), hidden)
        assert torch.allclose(self.model.relu_output(params, x, 1), torch.relu(hidden - 0.1))

    @pytest.mark.parametrize("layer", ["3", "0", "first", ""])
    def test_no_such_relu(self, layer):
        with pytest.raises(UserError, match=r"is no ReLU; it must be last, a number from 1 to 2, or one of rectifier"):
            self.model.relu_index(layer)

    def test_what_follows_may_work_in_place(self):
        class Skip(Named):
            def forward(self, x):
                h = torch.relu(self.first(x))
                h += 5
                return self.last(h)

        model = Model("skip", Skip, (3,), 2)
        params, x = model.init(0), torch.randn(40, 3)
        hidden = torch.relu(x @ params["first.weight"].T + params["first.bias"])
        assert torch.allclose(model.relu_output(params, x, 0), hidden)

    def test_a_network_without_one(self):
        with pytest.raises(UserError, match="model linear has no ReLU"):
            load_model("linear", (6,), 4).relu_index("last")


def represented(tiny, fleet, **kw):
    model = load_model("mlp", (6,), 4)
    program = MeasureSparsity(LocalTraining(model, **{"epochs": 0, "batch_size": 8} | kw))
    tasks = {c: Task({"m": model.init(0)}, {}, i) for i, c in enumerate(tiny)}
    return model, {c: r.tensors["sparsity"]["s"] for c, r in fleet(tiny).execute(Plan(program, tasks)).items()}


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
class TestSparsity:
    def test_zeros_are_counted_over_all_samples_and_over_halves(self, tiny, fleet):
        model, found = represented(tiny, fleet)
        for c, s in found.items():
            zero = (model.relu_output(model.init(0), tiny[c]["train"].x, 1) == 0).float()
            for row, rows in zip(s, (zero, zero, zero[::2], zero[1::2]), strict=True):
                assert torch.allclose(row, rows.mean(0))
            assert s.min() >= 0
            assert s.max() <= 1

    def test_pooled_data_give_the_weighted_mean(self, tiny, fleet):
        _, found = represented(tiny, fleet)
        sizes = {c: len(tiny[c]["train"].y) for c in tiny}
        pool = Samples(*(torch.cat([tiny[c]["train"][i] for c in tiny]) for i in (0, 1)))
        _, whole = represented({"all": dict.fromkeys(("train", "val", "test"), pool)}, PlainFleet)
        mean = sum(found[c][0] * sizes[c] for c in tiny) / sum(sizes.values())
        assert torch.allclose(whole["all"][0], mean, atol=1e-6)

    def test_a_local_epoch_changes_it(self, tiny, fleet):
        _, before = represented(tiny, fleet)
        _, after = represented(tiny, fleet, epochs=1)
        assert max(float((before[c][0] - after[c][0]).abs().max()) for c in tiny) > 0.01
        assert all(
            torch.equal(before[c][1:], after[c][1:]) for c in tiny
        )  # the random differences are measured with the received model

    def test_of_one_row_there_are_no_halves(self, tiny, fleet):
        model = load_model("mlp", (6,), 4)
        one = {c: {k: Samples(e.x[:1], e.y[:1]) for k, e in tiny[c].items()} for c in ("c0", "c1")}
        plan = Plan(MeasureSparsity(LocalTraining(model, epochs=0)), dict.fromkeys(one, Task({"m": model.init(0)})))
        for report in fleet(one).execute(plan).values():
            adapted, *rest = report.tensors["sparsity"]["s"]
            assert all(torch.equal(adapted, other) for other in rest)

    def test_convolutions_are_averaged_over_the_map(self, tiny, fleet):
        model = load_model("cnn-fedavg", (1, 28, 28), 4)
        data = {
            c: dict.fromkeys(("train", "val", "test"), Samples(torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])))
            for c in "ab"
        }
        program = MeasureSparsity(LocalTraining(model, epochs=0), layer="1")
        tasks = {c: Task({"m": model.init(0)}) for c in "ab"}
        s = fleet(data).execute(Plan(program, tasks))["a"].tensors["sparsity"]["s"]
        zero = (model.relu_output(model.init(0), data["a"]["train"].x, 0) == 0).float()
        assert torch.allclose(s[0], zero.mean((0, 2, 3)), atol=1e-6)


@dataclass(frozen=True)
class ByFirst:
    """Clusters by the first number. Late-joining clients join cluster 0."""

    def __call__(self, rows, seed):
        return np.unique(rows[:, 0], return_inverse=True)[1]

    def join(self, rows, labels, late_rows):
        return np.zeros(len(late_rows), dtype=np.int64)

    def recluster(self, rows, labels, new_rows, seed):
        return new_rows, self(new_rows, seed)


def reported_table(report_round=0, **values):
    row = {"told": torch.tensor(report_round), "size": torch.tensor(5)}
    return ClientTable.from_rows({c: {"x": torch.tensor([v]), **row} for c, v in values.items()})


def formed(state, table):
    return ClusterModels(ByFirst(), column="x").fold(
        replace(state, memory={**state.memory, "represent": table.to_tree()}), {}, 0
    )


class TestExperts:
    first = ServerState(0, {"global": {"w": torch.tensor([1.0])}})

    def test_every_cluster_starts_with_the_first_model(self):
        state = formed(self.first, reported_table(a=0.0, b=5.0, c=0.0))
        assert sorted(state.models) == ["expert-000", "expert-001"]
        assert all(m["w"].tolist() == [1.0] for m in state.models.values())
        assert {c: m.tolist() for c, m in state.membership.items()} == {"a": [1, 0], "b": [0, 1], "c": [1, 0]}

    def trained(self):
        state = formed(self.first, reported_table(a=0.0, b=5.0, c=0.0))
        return replace(
            state, round=3, models={"expert-000": {"w": torch.tensor([2.0])}, "expert-001": {"w": torch.tensor([8.0])}}
        )

    def test_nothing_changes_without_new_reports(self):
        state = self.trained()
        again = formed(state, reported_table(a=0.0, b=5.0, c=0.0))
        assert again.models is state.models
        assert again.membership is state.membership

    def test_late_clients_join_and_models_stay(self):
        state = formed(self.trained(), reported_table(a=0.0, b=5.0, c=0.0, d=9.0))
        assert state.membership["d"].tolist() == [1, 0]
        assert [state.models[k]["w"].item() for k in sorted(state.models)] == [2.0, 8.0]

    def test_clusters_that_are_formed_again_average_their_members_models(self):
        state = formed(self.trained(), reported_table(3, a=0.0, b=0.0, c=7.0))
        assert [state.models[k]["w"].item() for k in sorted(state.models)] == [5.0, 2.0]  # a and b had 2 and 8, c had 2

    def test_a_few_early_reports_do_not_decide_for_a_fleet(self):
        """Clusters of three clients are formed again when there are six."""
        five = formed(self.trained(), reported_table(a=0.0, b=5.0, c=0.0, d=9.0, e=9.0))
        assert [int(five.membership[c].argmax()) for c in "abcde"] == [0, 1, 0, 0, 0]
        six = formed(five, reported_table(a=0.0, b=5.0, c=0.0, d=9.0, e=9.0, f=9.0))
        assert [int(six.membership[c].argmax()) for c in "abcdef"] == [0, 1, 0, 2, 2, 2]
        assert [six.models[k]["w"].item() for k in sorted(six.models)] == [2.0, 8.0, 2.0]  # d and e had 2

    def test_a_client_without_samples_is_in_no_cluster(self):
        table = reported_table(a=0.0, b=5.0, c=9.0)
        state = formed(self.first, ClientTable(table.clients, {**table.columns, "size": torch.tensor([3, 3, 0])}))
        assert sorted(state.membership) == ["a", "b"]
        assert len(state.models) == 2

    def test_a_client_without_a_cluster_is_served_by_the_largest(self):
        state = self.trained()
        assert expert_for(state, None)["expert"]["w"].item() == 2.0
        assert expert_for(state, "b")["expert"]["w"].item() == 8.0
        assert expert_for(self.first, "x")["expert"]["w"].item() == 1.0


@pytest.mark.parametrize(
    ("was", "now", "moved"),
    [
        ([0, 0, 1, 1], [1, 1, 0, 0], 0),  # other numbers
        ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1], 1),
        ([0, 0, 0, 0, 0], [0, 0, 0, 1, 1], 2),  # the smaller part has left
        ([0, 0, 0, 1, 1], [0, 0, 0, 0, 0], 2),
        ([0, 0, 1, 2], [2, 2, 2, 0], 1),
        ([], [], 0),
    ],
)
def test_reassigned_clients_are_counted_whatever_the_cluster_numbers(was, now, moved):
    assert count_reassigned(np.array(was, dtype=np.int64), np.array(now, dtype=np.int64)) == moved


def test_late_clients_join_the_nearest_vectors():
    rows = np.repeat([[0.9, 0.1, 0.1], [0.1, 0.1, 0.9]], 3, axis=0)
    rows = np.concatenate([rows] * 4, axis=1)
    labels = np.array([0, 0, 0, 1, 1, 1])
    assert SparsityClusters().join(rows, labels, rows[[4, 1]]).tolist() == [1, 0]


def described(adapted, received=None, halves=None):
    """Rows of what a client reports: its adapted vector, that of the received model, and that on each half."""
    received = adapted if received is None else received
    one, other = halves or (received, received)
    return np.concatenate([np.atleast_2d(v) for v in (adapted, received, one, other)], axis=1)


def test_a_sparsity_above_1_is_refused():
    rows = described([[0.9, 0.1], [0.1, 1.5]])
    with pytest.raises(
        UserError, match=r"^A sparsity vector has the value 1\.5 in channel 1\. Sparsities must be 1 or less\.$"
    ):
        SparsityClusters()(rows, 0)
    with pytest.raises(UserError, match="Sparsities must be 1 or less"):
        SparsityClusters().recluster(described([[0.9, 0.1], [0.1, 0.5]]), np.array([0, 1]), rows, 0)


class TestDrift:
    left, right = [0.9, 0.1, 0.1], [0.1, 0.1, 0.9]
    rows = described([left, left, left, right, right, right])
    labels = np.array([0, 0, 0, 1, 1, 1])

    def test_without_drift_no_client_is_reassigned(self):
        """The same data give the same vector, even if a new local epoch changes the adapted one."""
        now = described(np.random.default_rng(0).uniform(size=(6, 3)), self.rows[:, 3:6])
        rows, labels = SparsityClusters(noise_guard_ratio=0).recluster(self.rows, self.labels, now, 0)
        assert np.array_equal(rows, self.rows)
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]

    def test_a_drifted_client_is_reassigned(self):
        now = self.rows.copy()
        now[2] = self.rows[3]
        rows, labels = SparsityClusters(noise_guard_ratio=0).recluster(self.rows, self.labels, now, 0)
        assert labels.tolist() == [0, 0, 1, 1, 1, 1]
        assert np.array_equal(rows, now)

    def test_random_differences_are_no_drift(self):
        """Halves differ by 0.2 in the first number, so two draws may well differ by 0.1."""
        left = np.array(self.left)
        reported_table = described(left, left, (left - [0.1, 0, 0], np.add(left, [0.1, 0, 0])))
        near = described(left, left - [0.1, 0, 0], (left - [0.2, 0, 0], left))
        far = described(left, left - [0.5, 0, 0], (left - [0.6, 0, 0], left - [0.4, 0, 0]))
        assert SparsityClusters().has_drifted(
            np.concatenate([reported_table, reported_table]), np.concatenate([near, far])
        ).tolist() == [
            False,
            True,
        ]

    def test_a_fleet_of_one_cluster_is_split(self):
        """All clients were similar, and half of them changed together."""
        before = described([self.left] * 6, halves=([self.left] * 6, [self.left] * 6))
        _, labels = SparsityClusters().recluster(before, np.zeros(6, dtype=np.int64), self.rows, 0)
        assert labels.tolist() == [0, 0, 0, 1, 1, 1]

    def test_models_go_with_their_members(self, tiny):
        """c0 to c2 have labels 0 and 1, c3 to c5 have 2 and 3. Then c2 gets the data of c3 and joins its cluster."""
        fleet = {c: ByLabels(0, 1) if i < 3 else ByLabels(2, 3) for i, c in enumerate(sorted(tiny))}
        method = build("fedepc", setting(rounds=6, options={"represent": {"every_rounds": 2, "lr": 0.05}}))
        first = engine.run(method, PlainFleet(fleet), rounds=2, seed=0)
        groups = {c: int(m.argmax()) for c, m in first.state.membership.items()}
        assert len({groups[c] for c in ("c0", "c1", "c2")}) == 1 != len(set(groups.values()))
        moved = PlainFleet(fleet | {"c2": ByLabels(2, 3)})
        then = engine.run(method, moved, rounds=4, seed=0, state=first.state, earlier_rounds=first.rounds)
        groups = {c: int(m.argmax()) for c, m in then.state.membership.items()}
        assert groups["c2"] == groups["c3"] != groups["c0"] == groups["c1"]
        reported_table = [(r.metrics["cluster.num_clusters"], r.metrics["cluster.num_reassigned"]) for r in then.rounds]
        assert reported_table == [(2, 0), (2, 0), (2, 1), (2, 0)]  # queried again in the third round: c2 has moved
        assert not then.state.round_metrics


def ByLabels(*labels):
    """200 samples of 6 numbers, of which the one at the index of the label is large."""
    rng = np.random.default_rng(labels)
    y = torch.from_numpy(rng.choice(labels, 200))
    x = torch.from_numpy(rng.normal(size=(200, 6))).float() + 3 * torch.nn.functional.one_hot(y, 6)
    return dict.fromkeys(("train", "val", "test"), Samples(x, y))


def test_the_method_is_the_papers():
    """Eq. (14) has a proximal term, Eq. (15) is the plain mean."""
    *_, train = build("fedepc", setting()).stages
    assert train.weighting == "uniform"
    assert train.program.mu > 0


class TestExtractor:
    model = load_model("mlp", (6,), 4)

    def test_the_first_weights_stay_the_extractor(self, tiny):
        method = build("fedepc", setting(rounds=3))
        result = engine.run(method, PlainFleet(tiny), rounds=3, seed=0)
        first = method.init(0).models["global"]
        assert all(torch.equal(result.state.memory["extractor"][k], first[k]) for k in first)
        assert not torch.equal(result.state.models["expert-000"]["fc1.weight"], first["fc1.weight"])

    def test_warm_up_rounds_train_one_model(self, tiny):
        method = build("fedepc", setting(rounds=4, options={"represent": {"warmup": 2}}))
        result = engine.run(method, PlainFleet(tiny), rounds=4, seed=0)
        asked = [p.round for p in result.ledger.entries if p.stage == "represent"]
        assert asked == [3]
        trained = engine.run(method, PlainFleet(tiny), rounds=2, seed=0).state
        assert list(trained.models) == ["global"]
        extractor = result.state.memory["extractor"]
        assert all(torch.equal(extractor[k], v) for k, v in trained.models["global"].items())

    def test_weights_from_a_file(self, tiny, tmp_path):
        given = self.model.init(7)
        save_file(given, tmp_path / "w.safetensors")
        options = {"represent": {"weights": str(tmp_path / "w.safetensors")}}
        result = engine.run(build("fedepc", setting(options=options)), PlainFleet(tiny), rounds=1, seed=0)
        assert all(torch.equal(result.state.memory["extractor"][k], given[k]) for k in given)

    def test_weights_that_do_not_fit(self, tiny, tmp_path):
        save_file(load_model("mlp", (7,), 4).init(0), tmp_path / "w.safetensors")
        for path, message in (
            (tmp_path / "w.safetensors", r"fc1.weight has shape \(64, 7\)\. Model mlp needs shape \(64, 6\)"),
            (tmp_path / "nothing", "but this is not a readable safetensors file"),
        ):
            with pytest.raises(UserError, match=message):
                KeepExtractor(self.model, weights=str(path)).fold(ServerState(0, {}), {}, 0)

    def test_one_of_both(self):
        with pytest.raises(UserError, match="Only one of them can be set"):
            KeepExtractor(self.model, warmup=1, weights="w")


class TestSelectByBandit:
    def test_no_client_is_selected_before_there_are_clusters(self):
        state = ServerState(0, {}, roster=("a", "b"))
        assert SelectByBandit().fold(state, {}, 0).cohort == ()

    def run(self, tiny, rounds=8, **options):
        slow = {c: PROFILES["microcontroller" if c == "c5" else "pi"] for c in tiny}
        built = build(
            "fedepc", setting(rounds=rounds, options={"cluster": {"noise_guard_ratio": 1e9}, "select": options})
        )
        return engine.run(built, PlainFleet(tiny), rounds=rounds, seed=0, ledger=Ledger(CostModel(profiles=slow)))

    @pytest.mark.parametrize("choice", ["bandit", "waiting", "random"])
    def test_slow_clients_do_not_fit(self, tiny, choice):
        """There is one cluster. c5 is forty times slower than the others, which exceeds the budget."""
        result = self.run(tiny, rule=choice, quantile=0.5)
        assert sorted(result.state.models) == ["expert-000"]
        cohorts = [p.clients for p in result.ledger.entries if p.stage == "train"]
        assert len(cohorts) == 8
        assert all(cohorts)
        assert not any("c5" in cohort for cohort in cohorts)

    def test_all_clients_fit_a_budget_of_all(self, tiny):
        result = self.run(tiny, time_budget_fraction=1.0)
        assert all(len(p.clients) == 6 for p in result.ledger.entries if p.stage == "train")

    def test_the_longest_waiting_client_is_next(self, tiny):
        """A budget of a sixth fits one of six clients of equal cost: all have trained after six rounds."""
        alike = dict.fromkeys(tiny, PROFILES["pi"])
        even = {c: {k: Samples(e.x[:12], e.y[:12]) for k, e in data.items()} for c, data in tiny.items()}
        options = {"cluster": {"noise_guard_ratio": 1e9}, "select": {"rule": "waiting", "time_budget_fraction": 0.17}}
        built = build("fedepc", setting(rounds=6, options=options))
        result = engine.run(built, PlainFleet(even), rounds=6, seed=0, ledger=Ledger(CostModel(profiles=alike)))
        cohorts = [p.clients for p in result.ledger.entries if p.stage == "train"]
        assert sorted(cohorts) == [(c,) for c in sorted(tiny)]

    def test_a_cluster_whose_loss_is_settled_stops(self, tiny):
        result = self.run(tiny, rounds=12, tolerance=1e9, history=2)
        trained = [p.round for p in result.ledger.entries if p.stage == "train"]
        assert trained == [1, 2]  # each with a change that is below the tolerance

    @pytest.mark.parametrize(("choice", "asked"), [("bandit", 8), ("random", 0), ("waiting", 0)])
    def test_losses_are_queried_only_if_they_are_used(self, tiny, choice, asked):
        pages = [p for p in self.run(tiny, rule=choice).ledger.entries if p.stage == "probe"]
        assert [len(p.clients) for p in pages] == [6] * asked

    def learned(self, losses, round=4):
        chosen = {"members": torch.zeros(1, 5), "slowest": torch.tensor(0.25), "round": torch.tensor(3)}
        history = ClientTable(tuple("abc"[: len(losses)]), {"loss": torch.tensor(losses)})
        return SelectByBandit()._with_reward(chosen, history, np.arange(len(losses)), round)

    def test_a_reward_compares_the_same_clients(self):
        """The losses were 2 and 4, then 1 and 2: half of 3 is gone, in a quarter of the mean time.

        c reported its first loss now, so it does not count.
        """
        entry = self.learned([[2.0, 1.0], [4.0, 2.0], [torch.nan, 100.0]])
        assert entry["bandit"]["rewards"].tolist() == [0.5 / 0.25]

    def test_a_set_without_reports_has_reward_0(self):
        assert self.learned([[2.0, 2.0]])["bandit"]["rewards"].tolist() == [0.0]

    def test_a_set_of_an_earlier_round_gives_no_reward(self):
        assert "bandit" not in self.learned([[2.0, 1.0]], round=7)

    @pytest.mark.parametrize("choice", ["bandit", "waiting"])
    def test_a_client_that_never_reports_does_not_stop_its_cluster(self, tiny, choice):
        """c5 needs the whole budget and never reports. It must wait for its next selection like all other clients."""

        class Silent(PlainFleet):
            def execute(self, plan):
                found = super().execute(plan)
                return {c: r for c, r in found.items() if c != "c5" or plan.program.name != "train"}

        slow = {c: PROFILES["microcontroller" if c == "c5" else "pi"] for c in tiny}
        built = build(
            "fedepc", setting(rounds=20, options={"cluster": {"noise_guard_ratio": 1e9}, "select": {"rule": choice}})
        )
        result = engine.run(built, Silent(tiny), rounds=20, seed=0, ledger=Ledger(CostModel(profiles=slow)))
        trained = {p.round for p in result.ledger.entries if p.stage == "train" and any(c != "c5" for c in p.clients)}
        assert len(trained) >= 10

    def test_clusters_continue_under_other_numbers(self):
        """Was: a b c in 0, d e in 1. Now d and e are 0, a and b are 1; c is alone."""
        before = ClientTable(tuple("abcde"), {"expert": torch.tensor([0, 0, 0, 1, 1])})
        now = ClientTable(tuple("abcde"), {"expert": torch.tensor([1, 1, 2, 0, 0])})
        assert _predecessors(now, before) == {0: (1, True), 1: (0, False), 2: (-1, False)}
        assert _predecessors(now, ClientTable()) == {0: (-1, False), 1: (-1, False), 2: (-1, False)}

    def test_losses_under_another_model_are_forgotten(self):
        """c moves from cluster 1 to cluster 0, under whose model it has no loss yet. The others stay."""
        stage = SelectByBandit(history=1)
        columns = {"loss": torch.tensor([[3.0, 2.0]] * 5), "norm": torch.ones(5, 1), "asked": torch.zeros(5)}
        before = ClientTable(tuple("abcde"), {**columns, "expert": torch.tensor([0, 0, 1, 1, 1])})
        now = ClientTable(tuple("abcde"), {"expert": torch.tensor([0, 0, 0, 1, 1])})
        probe = {"told": torch.full((5,), 4), "loss": torch.ones(5)}
        memory = {"probe": ClientTable(now.clients, probe).to_tree()}
        history = stage._updated_history(ServerState(4, {}, memory=memory), now, before, _predecessors(now, before))
        assert history["loss"][[0, 1, 3, 4]].tolist() == [[2.0, 1.0]] * 4
        assert history["loss"][2].isnan().tolist() == [True, False]

    def test_an_absent_cluster_pauses_and_returns(self, tiny):
        """There are two clusters of three. While one is absent the other trains, and its expert does not change."""
        fleet = {c: ByLabels(0, 1) if i < 3 else ByLabels(2, 3) for i, c in enumerate(sorted(tiny))}
        method = build("fedepc", setting(rounds=9, options={"represent": {"lr": 0.05}}))

        half = {c: fleet[c] for c in ("c0", "c1", "c2")}
        runs, state, records = [], None, ()
        for rounds, there in ((3, fleet), (6, half), (9, fleet)):
            result = engine.run(method, PlainFleet(there), rounds=rounds, seed=0, state=state, earlier_rounds=records)
            state, records = result.state, result.rounds
            runs.append(result)
        away = int(runs[0].state.membership["c3"].argmax())
        name = f"expert-{away:03d}"
        assert all(torch.equal(runs[0].state.models[name][k], v) for k, v in runs[1].state.models[name].items())
        assert not torch.equal(runs[2].state.models[name]["fc1.weight"], runs[1].state.models[name]["fc1.weight"])
        rewards = [r.state.memory["select"]["groups"][str(away)]["bandit"]["rounds"].item() for r in runs]
        assert rewards[0] == rewards[1] == 2 and rewards[2] > 2

    def test_a_stopped_cluster_continues_with_a_new_client(self, tiny):
        options = {"cluster": {"noise_guard_ratio": 1e9}, "select": {"tolerance": 1e9, "history": 2}}
        method = build("fedepc", setting(rounds=12, options=options))
        five = {c: d for c, d in tiny.items() if c != "c5"}
        first = engine.run(method, PlainFleet(five), rounds=6, seed=0)
        assert [p.round for p in first.ledger.entries if p.stage == "train"] == [1, 2]
        then = engine.run(method, PlainFleet(tiny), rounds=9, seed=0, state=first.state, earlier_rounds=first.rounds)
        assert [p.round for p in then.ledger.entries if p.stage == "train"] == [7, 8]

    def test_the_bandit_is_remembered(self, tiny):
        memory = self.run(tiny).state.memory["select"]
        assert len(memory["groups"]["0"]["bandit"]["rewards"]) == 7
        assert torch.isfinite(memory["groups"]["0"]["bandit"]["rewards"]).all()

    @pytest.mark.parametrize(
        ("key", "value"),
        [("time_budget_fraction", 0.0), ("quantile", 1.5), ("history", 0), ("tolerance", -1.0), ("beta_scale", -1.0)],
    )
    def test_bad_options(self, key, value):
        with pytest.raises(UserError, match=f"{key} is {value}"):
            build("fedepc", setting(options={"select": {key: value}}))


def test_querying_again(tiny):
    stage = QueryClients(MeasureSparsity(LocalTraining(load_model("mlp", (6,), 4))), expert_for, every_rounds=3)
    state = ServerState(0, {"global": load_model("mlp", (6,), 4).init(0)}, roster=tuple(tiny))
    first = stage.fold(state, PlainFleet(tiny).execute(stage.plan(state, 0)), 0)
    asked = {r: len(stage.plan(replace(first, round=r), 0).tasks) for r in range(1, 7)}
    assert asked == {1: 0, 2: 0, 3: 6, 4: 0, 5: 0, 6: 6}
