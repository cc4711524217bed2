"""The training prior of each model: the clients that trained it, their weights, and copies of models."""

from dataclasses import replace

import pytest
import torch

import shoal
from shoal.client.expert_mixture import corrected_logits
from shoal.client.prior import LABEL_COUNTS, PRIOR
from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.methods import Setting, build
from shoal.methods.shoal import Components
from shoal.models import load_model
from shoal.stages.global_and_experts import AggregateGlobalAndExperts, global_and_own_expert
from shoal.stages.train import LearningRate
from shoal.stages.training_prior import TrackTrainingPrior, training_priors
from shoal.types import Report, ServerState, Task

ZERO = {"w": torch.zeros(1)}


def state_of(counts, experts=0, groups=()):
    """Clients c0, c1, ... with label counts, some in clusters."""
    rows = {
        f"c{i}": {"labels": torch.tensor(n) / max(1, sum(n)), "size": torch.tensor(sum(n))}
        for i, n in enumerate(counts)
    }
    models = {"global": ZERO} | {f"expert-{k:03d}": ZERO for k in range(experts)}
    marks = torch.eye(experts + 1)
    member = {f"c{i}": marks[g] for i, g in enumerate(groups)}
    return ServerState(
        3, models, member, roster=tuple(rows), memory={"represent": ClientTable.from_rows(rows).to_tree()}
    )


def trained(state, *clients, uniform_mix=1.0, **keys):
    federate = AggregateGlobalAndExperts(
        LocalTraining(load_model("linear", (1,), 2)), global_and_own_expert, LearningRate(0.1, 9), **keys
    )
    sizes = dict(zip(state.roster, ClientTable.load(state, "represent")["size"].tolist(), strict=True))
    one = {"w": torch.ones(1)}
    reports = {c: Report({"model": one, "expert": one}, {}, {"train": sizes[c]}) for c in clients}
    federate = replace(federate, server_updates=(TrackTrainingPrior(uniform_mix),))
    return federate.fold(replace(state, cohort=state.roster), reports, 0)


def leans(state):
    """Without the thousandth that no class is below."""
    return {k: ((x - 0.0005) / 0.999).tolist() for k, x in training_priors(state).items()}


class TestTrackTrainingPrior:
    def test_the_samples_of_all_clients_that_trained(self):
        """All three are selected, and one does not report."""
        state = trained(state_of([[6, 2], [0, 8], [1, 1]]), "c0", "c2")
        assert leans(trained(state, "c0", "c2"))["global"] == pytest.approx([0.7, 0.3], abs=1e-5)

    def test_by_the_weights_of_clients(self):
        state = trained(state_of([[6, 2], [0, 2]]), "c0", "c1", weighting="uniform")
        assert leans(state)["global"] == pytest.approx([3 / 8, 5 / 8], abs=1e-5)

    def test_what_remains_after_logit_adjustment(self):
        """Half of equal classes makes (3/4, 1/4) and (0, 1) to (5/8, 3/8) and (1/4, 3/4): of (6, 10) samples (7, 9) are
        taken away."""
        state = trained(state_of([[6, 2], [0, 8]]), "c0", "c1", uniform_mix=0.5)
        assert leans(state)["global"] == pytest.approx([54 / 124, 70 / 124], abs=1e-5)

    def test_an_expert_by_its_members_and_by_what_it_was_before(self):
        """One round without experts, then two that start as the global model, then one split from the second."""
        state = trained(state_of([[8, 0], [0, 8]]), "c0", "c1")
        model = state.models["global"]
        state = replace(state, models={"global": model, "expert-000": model, "expert-001": model})
        state = replace(state, membership={"c0": torch.tensor([1.0, 0, 0]), "c1": torch.tensor([0, 1.0, 0])})
        state = trained(state, "c0", "c1")
        assert leans(state)["global"] == pytest.approx([0.5, 0.5], abs=1e-5)
        assert leans(state)["expert-000"] == pytest.approx([2 / 3, 1 / 3], abs=1e-5)
        assert leans(state)["expert-001"] == pytest.approx([1 / 3, 2 / 3], abs=1e-5)
        grown = {k: {"w": torch.full((1,), float(i))} for i, k in enumerate(state.models)}
        state = replace(state, models=grown | {"expert-002": grown["expert-001"]})
        assert leans(trained(state))["expert-002"] == pytest.approx([1 / 3, 2 / 3], abs=1e-5)

    def test_nothing_known(self):
        assert training_priors(ServerState(0, {})) == {}
        assert training_priors(trained(state_of([[1, 1]]))) == {}, "no client has trained"
        bare = replace(state_of([[1, 1]]), memory={})
        federate = AggregateGlobalAndExperts(
            LocalTraining(load_model("linear", (1,), 2)), global_and_own_expert, LearningRate(0.1, 9)
        )
        assert replace(federate, server_updates=(TrackTrainingPrior(1.0),)).fold(bare, {}, 0).memory == {}


def test_each_model_is_corrected_by_its_training_prior():
    model = load_model("linear", (2,), 2)
    method = build("shoal", Setting(model, rounds=2, cohort_size=3))
    zero = {k: torch.zeros_like(x) for k, x in model.init(0).items()}
    lean = {"global": torch.tensor([0.5, 0.5]), "expert-000": torch.tensor([0.9, 0.1])}
    models = {"global": zero, "expert-000": zero, PRIOR: lean}
    program = next(p for p in method.programs.values() if p.name == "personalise")
    s = program.begin(Task(models), {LABEL_COUNTS: torch.tensor([9.0, 1.0])})
    probabilities = corrected_logits(model, models, torch.zeros(1, 2), s["prior_corrections"])[0].softmax(-1)
    prior = torch.tensor([9.1, 1.1]) / 10.2
    torch.testing.assert_close(probabilities[0], prior)
    torch.testing.assert_close(probabilities[1], (prior / lean["expert-000"]) / (prior / lean["expert-000"]).sum())


def test_members_are_served_the_training_prior_of_each_model():
    fleet = shoal.partition(shoal.load("digits"), "iid+invert:0.5", clients=6, seed=0)
    keys = {
        "rounds": 3,
        "cohort": 4,
        "epochs": 1,
        "set": {"probe": {"first_round": 1, "min_cluster_size": 1}, "gate": {"epochs": 1}},
    }
    result = shoal.run("shoal", fleet, **keys)
    assert (
        sorted(result.state.memory["taught"]) == sorted(result.state.models) == ["expert-000", "expert-001", "global"]
    )


def test_prior_correction_needs_labels_whatever_else_is_off():
    bare = Components(selection="random", experts=False)
    assert bare.pieces(adjusts_logits=False)["represent"] == "labels"
    assert replace(bare, prior_correction=False).pieces(adjusts_logits=False)["represent"] == "none"
