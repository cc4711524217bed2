"""Clusters of first updates, and the exchange between their models (FedGroup)."""

from dataclasses import replace

import pytest
import torch
from cluster_states import ORIGIN, PROGRAM, make_model, make_setting, training_reports

from shoal import tree
from shoal.errors import UserError
from shoal.methods import build
from shoal.stages.coldstart import ExchangeBetweenClusters, FormColdStartClusters, JoinByFirstUpdate
from shoal.stages.experts import expert_for
from shoal.types import Report, ServerState


def idle(*values):
    return Report({"model": make_model(*values)}, {}, {"train": 0})


class TestColdStart:
    groups = FormColdStartClusters(PROGRAM, ("w",), num_clusters=2)
    join = JoinByFirstUpdate(PROGRAM, ("w",))

    def started(self):
        # from (1, 1): a and b went along (1, 0) by 2 and 4, c along (0, 1) by 1
        return self.groups.fold(ORIGIN, training_reports(a=(3.0, 1.0), b=(5.0, 1.0), c=(1.0, 2.0)), 0)

    def test_clusters_start_with_the_mean_of_their_members_models(self):
        state = self.started()
        assert {k: m["w"].tolist() for k, m in state.models.items()} == {"expert-000": [4, 1], "expert-001": [1, 2]}
        assert all(m["seen"] == 3 for m in state.models.values())
        assert {c: m.tolist() for c, m in state.membership.items()} == {"a": [1, 0], "b": [1, 0], "c": [0, 1]}

    def test_the_first_model_and_a_direction_for_each_cluster_are_remembered(self):
        kept = self.started().memory["cluster"]
        assert kept["directions"].tolist() == [[3, 0], [0, 1]]
        assert kept["first"].tolist() == [3, 1, 1]  # by sorted names: seen, w

    def test_others_start_from_the_first_model_and_join_by_direction(self):
        # d goes by (1, 3), cosines 1/√10 and 3/√10; e by (-1, -2): both are behind, the first less so
        state = self.started()
        state = replace(state, models={k: make_model(9.0, 9.0) for k in state.models})  # trained since
        plan = self.join.plan(state, 0)
        assert sorted(plan.tasks) == ["d", "e"]
        assert plan.tasks["d"].models["first"]["w"].tolist() == [1, 1]
        assert plan.tasks["d"].models["first"]["seen"].dtype == torch.int64
        after = self.join.fold(state, training_reports(d=(2.0, 4.0), e=(0.0, -1.0)), 0)
        assert after.membership["d"].tolist() == [0, 1]
        assert after.membership["e"].tolist() == [1, 0]
        assert after.models is state.models
        assert not self.join.plan(after, 0).tasks

    def test_buffers_are_means_too(self):
        seen = {"a": 5, "b": 9}
        reports = {
            c: Report({"model": make_model(2.0, 1.0) | {"seen": torch.tensor(n)}}, {}, {"train": 1})
            for c, n in seen.items()
        }
        (started,) = self.groups.fold(ORIGIN, reports, 0).models.values()
        assert started["seen"].item() == 7

    def test_a_client_without_samples_joins_no_cluster_and_is_queried_once(self):
        reports = training_reports(a=(3.0, 1.0), b=(5.0, 1.0), c=(1.0, 2.0)) | {"d": idle(1.0, 1.0)}
        state = self.groups.fold(ORIGIN, reports, 0)
        assert tree.max_abs_difference(state.models, self.started().models) == 0
        assert state.membership.keys() == {"a", "b", "c"}
        assert expert_for(state, "d")["expert"] is state.models["expert-000"]  # the largest cluster's
        assert self.groups.fold(ORIGIN, {"d": idle(1.0, 1.0)}, 0) is ORIGIN
        assert sorted(self.join.plan(state, 0).tasks) == ["d", "e"]
        after = self.join.fold(state, {"d": idle(1.0, 1.0)} | training_reports(e=(0.0, -1.0)), 0)
        assert after.membership.keys() == {"a", "b", "c", "e"}
        assert not self.join.plan(after, 0).tasks
        assert not self.join.plan(self.join.fold(after, {}, 0), 0).tasks

    def test_only_some_random_clients_are_queried_at_first(self):
        stage = FormColdStartClusters(PROGRAM, ("w",), num_clusters=1, alpha=2)
        asked = {tuple(stage.plan(ORIGIN, seed).tasks) for seed in range(30)}
        assert {len(clients) for clients in asked} == {2}
        assert set().union(*asked) == set(ORIGIN.roster)
        assert not stage.plan(self.started(), 0).tasks  # clusters are formed once

    def test_without_reports_nothing_changes(self):
        assert self.groups.fold(ORIGIN, {}, 0) is ORIGIN
        assert not self.join.plan(ORIGIN, 0).tasks
        assert len(self.groups.plan(ORIGIN, 0).tasks) == 5  # queried again

    def test_bad_options(self):
        with pytest.raises(UserError, match=r"cluster\.num_clusters is 0; it must be 1 or more"):
            build("fedgroup", make_setting(options={"cluster": {"num_clusters": 0}}))
        with pytest.raises(UserError, match=r"cluster\.eta is -1; it must be 0 or more"):
            build("fedgroup", make_setting(options={"cluster": {"eta": -1}}))


class TestExchangeBetweenClusters:
    state = ServerState(0, {"expert-000": make_model(3.0, 4.0), "expert-001": make_model(0.0, 2.0)})

    def test_by_hand(self):
        # lengths 5 and 2, eta 1: the first is ((3, 4) + (0, 2)/2) / (1 + 1/2), the second ((0, 2) + (3, 4)/5) / (6/5)
        models = ExchangeBetweenClusters(("w",), eta=1.0).fold(self.state, {}, 0).models
        assert models["expert-000"]["w"].tolist() == pytest.approx([2, 10 / 3])
        assert models["expert-001"]["w"].tolist() == pytest.approx([0.5, 7 / 3])

    def test_none_by_default(self):
        assert ExchangeBetweenClusters(("w",)).fold(self.state, {}, 0) is self.state
