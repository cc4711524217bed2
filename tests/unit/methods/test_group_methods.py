"""FedGroup and FLACC: a model for every group of clients whose updates point alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation
from sklearn.metrics import adjusted_rand_score

import shoal
from shoal import engine, tree
from shoal.client.model_choice import Choose
from shoal.client.train import LocalTraining
from shoal.client_table import Table
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.agglomerative import Agglomerate, JoinBest
from shoal.stages.coldstart import ClientColdStart, GroupColdStart, InterGroup
from shoal.stages.experts import expert_for, grouped
from shoal.stages.train import Federate, Rate
from shoal.types import Report, ServerState


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 8, "cohort": 6, "batch_size": 8} | kw)


def model(*values):
    return {"w": torch.tensor(values), "seen": torch.tensor(3)}  # "seen" is a buffer: never trained


def trained(**models):
    return {c: Report({"model": model(*values)}, {}, {"train": 1}) for c, values in models.items()}


def idle(*values):
    return Report({"model": model(*values)}, {}, {"train": 0})


def preferring(place, rows=1):
    return Report({"choice": {"place": torch.tensor(place)}}, {}, {"train": rows})


TRIAL = LocalTraining(load_model("linear", (6,), 4), name="represent")
ORIGIN = ServerState(0, {"global": model(1.0, 1.0)}, roster=("a", "b", "c", "d", "e"))


class TestColdStart:
    groups = GroupColdStart(TRIAL, ("w",), groups=2)
    join = ClientColdStart(TRIAL, ("w",))

    def started(self):
        # from (1, 1): a and b went along (1, 0) by 2 and 4, c along (0, 1) by 1
        return self.groups.fold(ORIGIN, trained(a=(3.0, 1.0), b=(5.0, 1.0), c=(1.0, 2.0)), 0)

    def test_groups_start_where_their_members_went(self):
        state = self.started()
        assert {k: m["w"].tolist() for k, m in state.models.items()} == {"expert-000": [4, 1], "expert-001": [1, 2]}
        assert all(m["seen"] == 3 for m in state.models.values())
        assert {c: m.tolist() for c, m in state.membership.items()} == {"a": [1, 0], "b": [1, 0], "c": [0, 1]}

    def test_kept_are_the_first_model_and_a_direction_for_each_group(self):
        kept = self.started().memory["cluster"]
        assert kept["directions"].tolist() == [[3, 0], [0, 1]]
        assert kept["first"].tolist() == [3, 1, 1]  # by sorted names: seen, w

    def test_others_start_from_the_first_model_and_join_by_direction(self):
        # d goes by (1, 3), cosines 1/√10 and 3/√10; e by (-1, -2): both are behind, the first less so
        state = self.started()
        state = replace(state, models={k: model(9.0, 9.0) for k in state.models})  # trained since
        plan = self.join.plan(state, 0)
        assert sorted(plan.tasks) == ["d", "e"]
        assert plan.tasks["d"].models["first"]["w"].tolist() == [1, 1]
        assert plan.tasks["d"].models["first"]["seen"].dtype == torch.int64
        after = self.join.fold(state, trained(d=(2.0, 4.0), e=(0.0, -1.0)), 0)
        assert after.membership["d"].tolist() == [0, 1]
        assert after.membership["e"].tolist() == [1, 0]
        assert after.models is state.models
        assert not self.join.plan(after, 0).tasks

    def test_buffers_are_means_too(self):
        seen = {"a": 5, "b": 9}
        reports = {
            c: Report({"model": model(2.0, 1.0) | {"seen": torch.tensor(n)}}, {}, {"train": 1}) for c, n in seen.items()
        }
        (started,) = self.groups.fold(ORIGIN, reports, 0).models.values()
        assert started["seen"].item() == 7

    def test_who_has_no_rows_joins_no_group_and_is_asked_once(self):
        reports = trained(a=(3.0, 1.0), b=(5.0, 1.0), c=(1.0, 2.0)) | {"d": idle(1.0, 1.0)}
        state = self.groups.fold(ORIGIN, reports, 0)
        assert tree.distance(state.models, self.started().models) == 0
        assert state.membership.keys() == {"a", "b", "c"}
        assert expert_for(state, "d")["expert"] is state.models["expert-000"]  # the largest group's
        assert self.groups.fold(ORIGIN, {"d": idle(1.0, 1.0)}, 0) is ORIGIN
        assert sorted(self.join.plan(state, 0).tasks) == ["d", "e"]
        after = self.join.fold(state, {"d": idle(1.0, 1.0)} | trained(e=(0.0, -1.0)), 0)
        assert after.membership.keys() == {"a", "b", "c", "e"}
        assert not self.join.plan(after, 0).tasks
        assert not self.join.plan(self.join.fold(after, {}, 0), 0).tasks

    def test_only_some_are_asked_at_first_and_by_chance(self):
        stage = GroupColdStart(TRIAL, ("w",), groups=1, alpha=2)
        asked = {tuple(stage.plan(ORIGIN, seed).tasks) for seed in range(30)}
        assert {len(clients) for clients in asked} == {2}
        assert set().union(*asked) == set(ORIGIN.roster)
        assert not stage.plan(self.started(), 0).tasks  # groups are formed once

    def test_nobody_answers(self):
        assert self.groups.fold(ORIGIN, {}, 0) is ORIGIN
        assert not self.join.plan(ORIGIN, 0).tasks
        assert len(self.groups.plan(ORIGIN, 0).tasks) == 5  # asked again

    def test_bad_options(self):
        with pytest.raises(UserError, match=r"cluster\.groups is 0; it must be 1 or more"):
            build("fedgroup", setting(options={"cluster": {"groups": 0}}))
        with pytest.raises(UserError, match=r"cluster\.eta is -1; it must be 0 or more"):
            build("fedgroup", setting(options={"cluster": {"eta": -1}}))


class TestInterGroup:
    state = ServerState(0, {"expert-000": model(3.0, 4.0), "expert-001": model(0.0, 2.0)})

    def test_by_hand(self):
        # lengths 5 and 2, eta 1: the first is ((3, 4) + (0, 2)/2) / (1 + 1/2), the second ((0, 2) + (3, 4)/5) / (6/5)
        models = InterGroup(("w",), eta=1.0).fold(self.state, {}, 0).models
        assert models["expert-000"]["w"].tolist() == pytest.approx([2, 10 / 3])
        assert models["expert-001"]["w"].tolist() == pytest.approx([0.5, 7 / 3])

    def test_none_by_default(self):
        assert InterGroup(("w",)).fold(self.state, {}, 0) is self.state


def met(state, stage, **updates):
    """A round in which these clients trained the shared model."""
    rows = {c: {"update": torch.tensor(u)} for c, u in updates.items()}
    state = replace(state, memory={**state.memory, "train": Table.of(rows).tree()})
    return replace(stage.fold(state, {}, 0), round=state.round + 1)


def groups_of(state):
    table = Table.read(state.memory["cluster"]["met"])
    return dict(zip(table.clients, table["group"].tolist(), strict=True))


class TestAgglomerate:
    stage = Agglomerate(patience=2)

    def test_clients_that_never_met_are_not_compared(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        state = met(state, self.stage, c=[1.0, 0.0], d=[-1.0, 0.0])
        assert groups_of(state) == {"a": 0, "b": 0, "c": 1, "d": 2}

    def test_groups_meet_through_any_of_their_clients(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        state = met(state, self.stage, b=[0.0, 1.0], d=[0.1, 1.0])  # another round, another base: still alike
        assert groups_of(state) == {"a": 0, "b": 0, "d": 0}

    def test_the_mean_over_meetings_decides(self):
        # cosines 1/√2, then -1: the mean is below 0, and what was merged comes apart
        one, two = {"a": [1.0, 0.0], "b": [1.0, 1.0]}, {"a": [1.0, 0.0], "b": [-1.0, 0.0]}
        state = met(ORIGIN, self.stage, **one)
        assert groups_of(state) == {"a": 0, "b": 0}
        assert groups_of(met(state, self.stage, **two)) == {"a": 0, "b": 1}
        table = Table.read(met(state, self.stage, **two).memory["cluster"]["met"])
        assert table["cosines"][0, 1].item() == pytest.approx(1 / np.sqrt(2) - 1)
        assert table["meetings"].tolist() == [[2, 2], [2, 2]]
        final = Agglomerate(patience=2, revise=False)
        assert groups_of(met(met(ORIGIN, final, **one), final, **two)) == {"a": 0, "b": 0}

    def parted(self):
        state, updates = (
            ORIGIN,
            {"a": [1.0, 0.0], "b": [2.0, 0.1], "c": [-1.0, 0.0], "d": [-1.0, 0.2], "e": [0.0, -9.0]},
        )
        state = met(state, self.stage, **updates)
        state = met(state, self.stage, **updates)
        assert not state.membership
        assert int(state.memory["cluster"]["quiet"]) == 1
        return met(state, self.stage, **updates)

    def test_after_quiet_rounds_groups_part_with_the_shared_model(self):
        state = self.parted()
        assert {k: m["w"].tolist() for k, m in state.models.items()} == {"expert-000": [1, 1], "expert-001": [1, 1]}
        marks = {c: m.tolist() for c, m in state.membership.items()}
        assert marks == {"a": [1, 0], "b": [1, 0], "c": [0, 1], "d": [0, 1]}  # e is alone, and in none
        assert state.memory == {"cluster": {"formed": torch.tensor(2)}}

    def test_and_stay(self):
        state = self.parted()
        after = met(state, self.stage, a=[1.0, 0.0], c=[1.0, 0.0])
        assert after.models is state.models
        assert after.membership is state.membership
        assert "train" not in after.memory

    def test_a_newcomer_that_stays_alone_is_no_change(self):
        state = met(ORIGIN, self.stage, b=[1.0, 0.0], c=[1.0, 0.1])
        state = met(state, self.stage, a=[-1.0, 0.0], b=[1.0, 0.0])
        assert int(state.memory["cluster"]["quiet"]) == 1

    def test_a_round_in_which_nothing_was_measured_is_not_quiet(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        for client in "abcabc":
            state = met(state, self.stage, **{client: [1.0, 0.0]})
        assert int(state.memory["cluster"]["quiet"]) == 0
        assert not state.membership
        for _ in range(2):
            state = met(state, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        assert state.membership.keys() == {"a", "b"}

    def test_one_model_is_kept_while_nobody_is_alike(self):
        state = ORIGIN
        for _ in range(5):
            state = met(state, self.stage, a=[1.0, 0.0], b=[-1.0, 0.0])
        assert sorted(state.models) == ["global"]
        assert met(state, Agglomerate(patience=2, smallest=1), a=[1.0, 0.0], b=[-1.0, 0.0]).membership.keys() == {
            "a",
            "b",
        }

    def test_a_round_without_answers_changes_nothing(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.0])
        assert met(state, self.stage).memory == state.memory

    @pytest.mark.parametrize(("key", "value"), [("patience", 0), ("smallest", 0), ("threshold", 1.5)])
    def test_bad_options(self, key, value):
        with pytest.raises(UserError, match=rf"cluster\.{key} is {value}"):
            build("flacc", setting(options={"cluster": {key: value}}))


class TestJoinBest:
    stage = JoinBest(Choose(load_model("mlp", (6,), 4), name="join"))

    def test_models_that_are_the_same_are_not_offered(self):
        # groups 0 and 2 have not trained since they parted; of four, two models can be told apart from all others
        models = [model(1.0, 1.0), model(1.0, 2.0), model(1.0, 1.0), model(1.0, 3.0)]
        state = grouped(ORIGIN, models, ("a", "b", "c", "d"), np.arange(4))
        plan = self.stage.plan(state, 0)
        assert {c: sorted(t.models) for c, t in plan.tasks.items()} == {"e": ["expert-001", "expert-003"]}
        assert self.stage.fold(state, {"e": preferring(1)}, 0).membership["e"].tolist() == [0, 0, 0, 1]
        one = grouped(ORIGIN, models[:3], ("a", "b", "c"), np.arange(3))
        assert not self.stage.plan(one, 0).tasks  # one alone is no choice
        assert len(self.stage.plan(grouped(ORIGIN, models[:1], ("a",), np.arange(1)), 0).tasks) == 4  # unless it is all

    def test_who_has_no_rows_joins_none_and_is_asked_once(self):
        state = grouped(ORIGIN, [model(1.0, 1.0), model(1.0, 2.0)], ("a", "b"), np.array([0, 1]))
        after = self.stage.fold(state, {"c": preferring(0, rows=0), "d": preferring(1)}, 0)
        assert after.membership.keys() == {"a", "b", "d"}
        assert sorted(self.stage.plan(after, 0).tasks) == ["e"]

    def test_nobody_is_asked_while_two_models_are_the_same(self):
        assert not self.stage.plan(ORIGIN, 0).tasks
        labels = np.array([0, 1])
        same = grouped(ORIGIN, [model(1.0, 1.0), model(1.0, 1.0)], ("a", "b"), labels)
        assert not self.stage.plan(same, 0).tasks
        other = grouped(ORIGIN, [model(1.0, 1.0), model(1.0, 2.0)], ("a", "b"), labels)
        assert sorted(self.stage.plan(other, 0).tasks) == ["c", "d", "e"]

    def test_who_chose_a_model_is_in_its_group(self):
        state = grouped(ORIGIN, [model(1.0, 1.0), model(1.0, 2.0)], ("a", "b"), np.array([0, 1]))
        told = {c: preferring(k) for c, k in {"c": 1, "e": 0}.items()}
        after = self.stage.fold(state, told, 0)
        assert after.membership["c"].tolist() == [0, 1]
        assert after.membership["e"].tolist() == [1, 0]
        assert "d" not in after.membership


def test_who_is_in_no_group_changes_no_model():
    stage = Federate(TRIAL, expert_for, Rate(0.1, 1))
    state = grouped(ORIGIN, [model(1.0, 1.0), model(2.0, 2.0)], ("a", "b"), np.array([0, 1]))
    models = stage.fold(state, trained(a=(5.0, 5.0), e=(9.0, 9.0)), 0).models
    assert models["expert-000"]["w"].tolist() == [5, 5]
    assert models["expert-001"]["w"].tolist() == [2, 2]


def test_names_sort_in_the_order_of_groups():
    clients = [str(i) for i in range(1001)]
    state = grouped(ORIGIN, [model(float(i), 0.0) for i in range(1001)], clients, np.arange(1001))
    assert expert_for(state, "1000")["expert"]["w"][0] == 1000
    assert expert_for(state, "999")["expert"]["w"][0] == 999


def play(tiny, fleet, name, **options):
    built = build(name, setting(options={"cluster": options}))
    return engine.run(built, fleet(tiny), rounds=8, seed=0, central=tiny.central, eval_every=8)


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
    assert tree.distance(plain.state.models, vector.state.models) < 1e-5
    assert tree.distance(plain.state.membership, vector.state.membership) == 0
    assert tree.distance(plain.state.memory, vector.state.memory) < 1e-5
    assert plain.ledger == vector.ledger


def test_flacc_is_fedavg_until_groups_part(tiny):
    fed = engine.run(build("fedavg", setting(cohort=3)), PlainFleet(tiny), rounds=4, seed=0)
    one = engine.run(build("flacc", setting(cohort=3)), PlainFleet(tiny), rounds=4, seed=0)
    assert tree.distance(fed.state.models, one.state.models) == 0
    assert [r.bytes_up for r in fed.records] == [r.bytes_up for r in one.records]


def found(method, partition, rounds):
    fleet = shoal.partition(shoal.load("digits"), partition, clients=12, seed=0)
    state = shoal.run(method, fleet, rounds=rounds, cohort=6, epochs=2, lr=0.1, seed=0, eval_every=rounds).state
    labels = [int(state.membership[c].argmax()) for c in fleet]
    return labels, [fleet.groups[c] for c in fleet] if fleet.groups else None


@pytest.mark.parametrize(("method", "rounds"), [("fedgroup", 1), ("flacc", 14)])
def test_planted_label_groups_are_found(method, rounds):
    labels, truth = found(method, "groups:3,1.0", rounds)
    assert adjusted_rand_score(truth, labels) == 1


def test_nearly_iid_clients_stay_together():
    assert max(found("flacc", "iid", 13)[0]) == 0
