"""Known planted groups: each client predicts with the expert of its group."""

from __future__ import annotations

import torch

import shoal
from shoal.experiment.assemble import assemble
from shoal.experiment.job import Job
from shoal.stages.global_and_experts import GLOBAL
from shoal.stages.momentum import ema_models
from shoal.study.oracle import oracle


def test_each_client_predicts_with_the_expert_of_its_planted_group():
    fleet = shoal.partition(shoal.load("digits"), "iid+invert:0.5", clients=6, seed=0)
    keys = {"rounds": 3, "cohort": 6, "epochs": 1, "set": {"probe": {"first_round": 1}}}
    result = shoal.run(oracle, fleet, **keys)
    state, method = result.state, assemble(Job(**keys), oracle, fleet).method
    assert sorted(state.models) == ["expert-000", "expert-001", GLOBAL]
    assert {c: int(w.argmax()) for c, w in state.membership.items()} == fleet.planted_groups
    for client, group in fleet.planted_groups.items():
        served, expert = method.models_for(state, client)[GLOBAL], ema_models(state)[f"expert-{group:03d}"]
        assert all(torch.equal(served[k], expert[k]) for k in expert)
    default = method.models_for(state, None)[GLOBAL]
    assert all(torch.equal(default[k], x) for k, x in ema_models(state)[GLOBAL].items())


def test_without_planted_groups_there_is_one_model():
    fleet = shoal.partition(shoal.load("digits"), "iid", clients=4, seed=0)
    result = shoal.run(oracle, fleet, rounds=2, cohort=4, epochs=1, set={"probe": {"first_round": 0}})
    assert list(result.state.models) == [GLOBAL]
