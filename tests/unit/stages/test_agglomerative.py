"""Clusters that are merged, and clients that join the best of them (FLACC)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cluster_states import ORIGIN, make_model, make_setting

from shoal.client.model_choice import ChooseModel
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.methods import build
from shoal.models import load_model
from shoal.stages.agglomerative import FormAgglomerativeClusters, JoinBestCluster
from shoal.stages.experts import set_clusters
from shoal.types import Report


def choice_report(place, rows=1):
    return Report({"choice": {"place": torch.tensor(place)}}, {}, {"train": rows})


def met(state, stage, **updates):
    """A round in which these clients trained the shared model."""
    rows = {c: {"update": torch.tensor(u)} for c, u in updates.items()}
    state = replace(state, memory={**state.memory, "train": ClientTable.from_rows(rows).to_tree()})
    return replace(stage.fold(state, {}, 0), round=state.round + 1)


def clusters_of(state):
    table = ClientTable.from_tree(state.memory["cluster"]["met"])
    return table.to_dict("group")


class TestAgglomerate:
    stage = FormAgglomerativeClusters(patience=2)

    def test_clients_that_never_met_are_not_compared(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        state = met(state, self.stage, c=[1.0, 0.0], d=[-1.0, 0.0])
        assert clusters_of(state) == {"a": 0, "b": 0, "c": 1, "d": 2}

    def test_clusters_are_compared_through_any_of_their_clients(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.1])
        state = met(state, self.stage, b=[0.0, 1.0], d=[0.1, 1.0])  # another round with another model: still similar
        assert clusters_of(state) == {"a": 0, "b": 0, "d": 0}

    def test_the_mean_over_meetings_decides(self):
        # cosines 1/√2, then -1: the mean is below 0, and what was merged comes apart
        one, two = {"a": [1.0, 0.0], "b": [1.0, 1.0]}, {"a": [1.0, 0.0], "b": [-1.0, 0.0]}
        state = met(ORIGIN, self.stage, **one)
        assert clusters_of(state) == {"a": 0, "b": 0}
        assert clusters_of(met(state, self.stage, **two)) == {"a": 0, "b": 1}
        table = ClientTable.from_tree(met(state, self.stage, **two).memory["cluster"]["met"])
        assert table["cosines"][0, 1].item() == pytest.approx(1 / np.sqrt(2) - 1)
        assert table["meetings"].tolist() == [[2, 2], [2, 2]]
        final = FormAgglomerativeClusters(patience=2, remerge=False)
        assert clusters_of(met(met(ORIGIN, final, **one), final, **two)) == {"a": 0, "b": 0}

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

    def test_after_rounds_without_changes_each_cluster_gets_a_copy_of_the_model(self):
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

    def test_a_new_client_in_a_cluster_of_its_own_is_no_change(self):
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

    def test_one_model_stays_while_no_clients_are_similar(self):
        state = ORIGIN
        for _ in range(5):
            state = met(state, self.stage, a=[1.0, 0.0], b=[-1.0, 0.0])
        assert sorted(state.models) == ["global"]
        assert met(
            state, FormAgglomerativeClusters(patience=2, min_size=1), a=[1.0, 0.0], b=[-1.0, 0.0]
        ).membership.keys() == {
            "a",
            "b",
        }

    def test_a_round_without_reports_changes_nothing(self):
        state = met(ORIGIN, self.stage, a=[1.0, 0.0], b=[1.0, 0.0])
        assert met(state, self.stage).memory == state.memory

    @pytest.mark.parametrize(("key", "value"), [("patience", 0), ("min_size", 0), ("threshold", 1.5)])
    def test_bad_options(self, key, value):
        with pytest.raises(UserError, match=rf"cluster\.{key} is {value}"):
            build("flacc", make_setting(options={"cluster": {key: value}}))


class TestJoinBest:
    stage = JoinBestCluster(ChooseModel(load_model("mlp", (6,), 4), name="join"))

    def test_models_that_are_the_same_are_not_offered(self):
        # clusters 0 and 2 have not trained since the split, so two of the four models differ from all others
        models = [make_model(1.0, 1.0), make_model(1.0, 2.0), make_model(1.0, 1.0), make_model(1.0, 3.0)]
        state = set_clusters(ORIGIN, models, ("a", "b", "c", "d"), np.arange(4))
        plan = self.stage.plan(state, 0)
        assert {c: sorted(t.models) for c, t in plan.tasks.items()} == {"e": ["expert-001", "expert-003"]}
        assert self.stage.fold(state, {"e": choice_report(1)}, 0).membership["e"].tolist() == [0, 0, 0, 1]
        one = set_clusters(ORIGIN, models[:3], ("a", "b", "c"), np.arange(3))
        assert not self.stage.plan(one, 0).tasks  # a single model is no choice
        assert (
            len(self.stage.plan(set_clusters(ORIGIN, models[:1], ("a",), np.arange(1)), 0).tasks) == 4
        )  # unless it is all

    def test_a_client_without_samples_joins_no_cluster_and_is_queried_once(self):
        state = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(1.0, 2.0)], ("a", "b"), np.array([0, 1]))
        after = self.stage.fold(state, {"c": choice_report(0, rows=0), "d": choice_report(1)}, 0)
        assert after.membership.keys() == {"a", "b", "d"}
        assert sorted(self.stage.plan(after, 0).tasks) == ["e"]

    def test_no_client_is_queried_while_two_models_are_equal(self):
        assert not self.stage.plan(ORIGIN, 0).tasks
        labels = np.array([0, 1])
        same = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(1.0, 1.0)], ("a", "b"), labels)
        assert not self.stage.plan(same, 0).tasks
        other = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(1.0, 2.0)], ("a", "b"), labels)
        assert sorted(self.stage.plan(other, 0).tasks) == ["c", "d", "e"]

    def test_a_client_joins_the_cluster_of_the_model_that_it_chose(self):
        state = set_clusters(ORIGIN, [make_model(1.0, 1.0), make_model(1.0, 2.0)], ("a", "b"), np.array([0, 1]))
        reports = {c: choice_report(k) for c, k in {"c": 1, "e": 0}.items()}
        after = self.stage.fold(state, reports, 0)
        assert after.membership["c"].tolist() == [0, 1]
        assert after.membership["e"].tolist() == [1, 0]
        assert "d" not in after.membership
