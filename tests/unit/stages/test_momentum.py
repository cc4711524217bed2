"""Server momentum and EMA models, by hand."""

from dataclasses import replace

import pytest
import torch

import shoal
from shoal import tree
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.pieces.aggregate.momentum import ServerMomentum
from shoal.models import load_model
from shoal.stages.momentum import ApplyMomentum, UpdateEmaModels, ema_models
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Report, ServerState

PLAIN = {
    "components": {"selection": "random", "prior_correction": False, "experts": False},
    "server": {"momentum": 0, "lr": 1, "ema_decay": 0},
    "train": {"logit_adjustment": "off"},
}


def stage(beta, step=1.0):
    model = load_model("linear", (1,), 2)
    momentum = ApplyMomentum(beta, step)
    return TrainAndAggregate(
        LocalTraining(model), one_model_for, LearningRate(0.1, 9), trainable=("w",), server_updates=(momentum,)
    )


def reported(value, count=7):
    return {"c0": Report({"model": {"w": torch.tensor([value]), "n": torch.tensor(count)}}, {}, {"train": 5})}


def start():
    return ServerState(0, {"global": {"w": torch.tensor([1.0]), "n": torch.tensor(0)}})


class TestMomentum:
    def test_by_hand(self):
        """Clients always report w + 1. v: 1, 1.5, 1.75; w: 1, then 2, 3.5, 5.25."""
        state, found = start(), []
        for _ in range(3):
            state = stage(0.5).fold(state, reported(float(state.models["global"]["w"]) + 1), 0)
            found.append(float(state.models["global"]["w"]))
        assert found == [2.0, 3.5, 5.25]
        assert int(state.models["global"]["n"]) == 7, "what is no parameter is the mean"

    def test_a_longer_step_by_hand(self):
        """Clients always report w + 1. v: 2, 2 + 1, 2 + 1.5; w: 1, then 3, 6, 9.5."""
        state, found = start(), []
        for _ in range(3):
            state = stage(0.5, 2.0).fold(state, reported(float(state.models["global"]["w"]) + 1), 0)
            found.append(float(state.models["global"]["w"]))
        assert found == [3.0, 6.0, 9.5]
        assert float(stage(0.0, 0.5).fold(start(), reported(2.0), 0).models["global"]["w"]) == 1.5

    def test_a_learning_rate_must_go_forward(self):
        with pytest.raises(UserError, match=r"server.lr is 0.0; it must be above 0"):
            ServerMomentum(lr=0.0)

    def test_without_it_the_mean_itself(self):
        state = stage(0.0).fold(start(), reported(3.3), 0)
        assert torch.equal(state.models["global"]["w"], torch.tensor([3.3]))
        assert "momentum" not in state.memory

    def test_an_untrained_model_does_not_move(self):
        state = stage(0.5).fold(start(), reported(2.0), 0)
        after = stage(0.5).fold(state, {}, 0)
        assert tree.max_abs_difference(after.models, state.models) == 0
        assert float(after.memory["momentum"]["global"]["w"]) == 1.0

    def test_a_model_that_is_gone_leaves_nothing(self):
        state = stage(0.5).fold(start(), reported(2.0), 0)
        state = replace(state, memory={"momentum": {**state.memory["momentum"], "old": {"w": torch.zeros(1)}}})
        assert list(stage(0.5).fold(state, reported(2.0), 0).memory["momentum"]) == ["global"]

    @pytest.mark.parametrize("beta", [-0.1, 1.0])
    def test_what_is_refused(self, beta):
        with pytest.raises(UserError, match="it must be from 0 to below 1"):
            ServerMomentum(momentum=beta)


class TestRunningMean:
    def test_by_hand(self):
        """1, then 0.8 · 1 + 0.2 · 6 = 2, then 0.8 · 2 + 0.2 · 7 = 3."""
        state, found = start(), []
        for value in (1.0, 6.0, 7.0):
            model = {"w": torch.tensor([value]), "n": torch.tensor(int(value))}
            state = UpdateEmaModels(0.8).fold(replace(state, models={"global": model}), {}, 0)
            found.append(float(ema_models(state)["global"]["w"]))
        assert found == pytest.approx([1, 2, 3])
        assert int(ema_models(state)["global"]["n"]) == 7
        assert float(state.models["global"]["w"]) == 7.0, "training continues from the newest model"

    def test_before_there_is_one_the_model_itself(self):
        assert ema_models(start())["global"] is start().models["global"] or torch.equal(
            ema_models(start())["global"]["w"], torch.tensor([1.0])
        )

    def test_new_models_begin_as_they_are_and_old_ones_go(self):
        state = UpdateEmaModels(0.5).fold(start(), {}, 0)
        state = UpdateEmaModels(0.5).fold(replace(state, models={"expert": {"w": torch.tensor([4.0])}}), {}, 0)
        assert {k: float(m["w"]) for k, m in ema_models(state).items()} == {"expert": 4.0}
        assert list(state.memory["average"]) == ["expert"]


def digits():
    return shoal.partition(shoal.load("digits"), "dirichlet:0.3", clients=8, seed=0)


def test_without_all_of_its_components_it_is_fedavg_bit_for_bit():
    keys = {"rounds": 4, "cohort": 3, "epochs": 2, "lr": 0.1, "seed": 1}
    plain, ours = shoal.run("fedavg", digits(), **keys), shoal.run("shoal", digits(), **keys, set=PLAIN)
    assert tree.max_abs_difference(ours.state.models, plain.state.models) == 0
    assert [r.to_json() for r in ours.rounds] == [r.to_json() for r in plain.rounds]
    assert ours.ledger == plain.ledger


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("server", "momentum", 0.7),
        ("server", "ema_decay", 0.8),
        ("components", "selection", "balanced"),
        ("train", "logit_adjustment", "on"),
    ],
)
def test_each_component_makes_a_difference(group, key, value):
    keys = {"rounds": 4, "cohort": 3, "epochs": 2, "lr": 0.1, "seed": 1}
    plain = shoal.run("fedavg", digits(), **keys)
    ours = shoal.run("shoal", digits(), **keys, set=PLAIN | {group: PLAIN[group] | {key: value}})
    assert ours.accuracy["central"] != plain.accuracy["central"]
