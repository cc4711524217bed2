from dataclasses import replace

import pytest
import torch

from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.models import load_model
from shoal.stages.personalise import Personalise
from shoal.stages.select import SelectCentralised, SelectRandom
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import CENTRALISED_CLIENT, Report, ServerState

ROSTER = tuple(f"c{i}" for i in range(10))
STATE = ServerState(0, {"a": {"w": torch.tensor([0.0])}, "b": {"w": torch.tensor([0.0])}}, roster=ROSTER)


def models_for(state, client):
    return {"a": state.models["a"]}


def federate(**kw):
    program = LocalTraining(load_model("linear", (1,), 2))
    return TrainAndAggregate(program, models_for, LearningRate(0.1, 10), **kw)


def report(w, n):
    return Report({"model": {"w": torch.tensor([w])}}, {}, {"train": n})


class TestUniform:
    def test_size_distinct_and_from_the_roster(self):
        for seed in range(50):
            cohort = SelectRandom().fold(replace(STATE, cohort_size=4), {}, seed).cohort
            assert len(set(cohort)) == 4
            assert set(cohort) <= set(ROSTER)

    def test_follows_from_the_seed(self):
        picks = [SelectRandom().fold(replace(STATE, cohort_size=4), {}, seed).cohort for seed in (1, 1, 2)]
        assert picks[0] == picks[1] != picks[2]

    def test_every_client_equally_often(self):
        # 1000 draws of 3 of 10: 300 each, standard deviation sqrt(1000 * .3 * .7) = 14.5
        often = dict.fromkeys(ROSTER, 0)
        for seed in range(1000):
            for c in SelectRandom().fold(replace(STATE, cohort_size=3), {}, seed).cohort:
                often[c] += 1
        assert all(240 < n < 360 for n in often.values())

    def test_small_single_and_empty_rosters(self):
        assert SelectRandom().fold(replace(STATE, cohort_size=4, roster=ROSTER[:2]), {}, 0).cohort == ROSTER[:2]
        assert SelectRandom().fold(replace(STATE, cohort_size=4, roster=ROSTER[:1]), {}, 0).cohort == ROSTER[:1]
        assert SelectRandom().fold(replace(STATE, cohort_size=4, roster=()), {}, 0).cohort == ()

    def test_input_unmodified(self):
        SelectRandom().fold(replace(STATE, cohort_size=4), {}, 0)
        assert STATE.cohort == ()
        assert STATE.roster == ROSTER


def test_relabelling_clients_relabels_the_selection():
    renamed = {c: f"x{c}" for c in ROSTER}
    here = replace(STATE, cohort_size=4)
    there = replace(here, roster=tuple(renamed[c] for c in ROSTER))
    assert (
        tuple(renamed[c] for c in SelectRandom().fold(here, {}, 7).cohort) == SelectRandom().fold(there, {}, 7).cohort
    )


def test_pooled_chooses_the_pool():
    assert SelectCentralised().fold(STATE, {}, 0).cohort == (CENTRALISED_CLIENT,)


class TestFederate:
    def test_weighted_by_size(self):
        # (1*10 + 4*30) / 40 = 3.25, in both models, because no client has a membership
        after = federate().fold(STATE, {"c0": report(1.0, 10), "c1": report(4.0, 30)}, 0)
        assert after.models["a"]["w"].item() == pytest.approx(3.25)

    def test_uniform_weights(self):
        reports = {"c0": report(1.0, 10), "c1": report(4.0, 30)}
        after = federate(weighting="uniform").fold(STATE, reports, 0)
        assert after.models["a"]["w"].item() == pytest.approx(2.5)

    @pytest.mark.parametrize("weighting", ["size", "uniform"])
    def test_a_client_without_samples_does_not_count(self, weighting):
        stage = federate(weighting=weighting, remember="model")
        after = stage.fold(STATE, {"c0": report(1.0, 10), "c1": report(4.0, 0)}, 0)
        assert after.models["a"]["w"].item() == 1
        assert ClientTable.load(after, "train").clients == ("c0",)
        assert stage.fold(STATE, {"c1": report(4.0, 0)}, 0).models["a"] is STATE.models["a"]

    def test_membership_divides_the_clients(self):
        member = {"c0": torch.tensor([1.0, 0.0]), "c1": torch.tensor([0.5, 0.5]), "c2": torch.tensor([0.0, 1.0])}
        reports = {"c0": report(1.0, 10), "c1": report(4.0, 20), "c2": report(9.0, 30)}
        after = federate().fold(replace(STATE, membership=member), reports, 0)
        assert after.models["a"]["w"].item() == pytest.approx((1 * 10 + 4 * 10) / 20)
        assert after.models["b"]["w"].item() == pytest.approx((4 * 10 + 9 * 30) / 40)

    def test_a_round_without_reports_changes_nothing(self):
        after = federate().fold(STATE, {}, 0)
        assert after.models["a"] is STATE.models["a"]

    def test_a_cluster_without_reports_keeps_its_model(self):
        member = {"c0": torch.tensor([1.0, 0.0])}
        after = federate().fold(replace(STATE, membership=member), {"c0": report(1.0, 10)}, 0)
        assert after.models["a"]["w"].item() == 1
        assert after.models["b"] is STATE.models["b"]

    def test_order_of_reports_does_not_matter_much(self):
        reports = {f"c{i}": report(float(i), i + 1) for i in range(10)}
        backwards = dict(reversed(reports.items()))
        one, two = (federate().fold(STATE, r, 0).models["a"]["w"] for r in (reports, backwards))
        assert torch.allclose(one, two)

    def test_the_task_carries_the_rate_of_the_round(self):
        stage = replace(federate(), rate=LearningRate(1.0, 10, "exponential", 0.01))
        plan = stage.plan(replace(STATE, round=5, cohort=("c1",)), 3)
        assert plan.tasks["c1"].config["lr"] == pytest.approx(0.1)

    def test_clients_have_seeds_of_their_own(self):
        plan = federate().plan(replace(STATE, cohort=ROSTER), 3)
        assert len({t.seed for t in plan.tasks.values()}) == 10


def test_personalise_is_due_when_the_fleet_is_evaluated():
    stage = Personalise(LocalTraining(load_model("linear", (1,), 2)), models_for, rounds=10, every_rounds=4)
    assert [r for r in range(10) if stage.due(r)] == [3, 7, 9]
    assert set(stage.plan(STATE, 0).tasks) == set(ROSTER)


@pytest.mark.parametrize("bad", [{"schedule": "linear"}, {"decay": 0.0}, {"decay": 1.5}])
def test_bad_rates(bad):
    with pytest.raises(UserError):
        LearningRate(0.1, 10, **bad).at(0)
