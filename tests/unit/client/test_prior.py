"""Class priors: counted, estimated without labels, used in the loss and in predictions; all numbers by hand."""

import math
from dataclasses import replace

import pytest
import torch
from federations import tiny_federation

from shoal import engine
from shoal.client.prior import (
    LABEL_COUNTS,
    PRIOR,
    AdjustedTraining,
    CountLabels,
    EstimatePrior,
    expected_counts,
    log_likelihood_gain,
    logit_correction,
    mix_with_uniform,
    smoothed_prior,
)
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import UNLABELLED_SPLIT, Batch, Plan, Samples, Task

MODEL = load_model("linear", (2,), 2)


def test_mixed_and_smoothed():
    counts = torch.tensor([3.0, 1.0])
    assert mix_with_uniform(counts, 0.5).tolist() == [0.625, 0.375]  # half of (3/4, 1/4), half of (1/2, 1/2)
    assert mix_with_uniform(torch.zeros(2), 0.3).tolist() == pytest.approx([0.5, 0.5])
    torch.testing.assert_close(smoothed_prior(counts, 0.5), torch.tensor([0.7, 0.3]))  # 3.5 / 5, 1.5 / 5
    assert counts.tolist() == [3, 1]


def test_correction():
    private = {LABEL_COUNTS: torch.tensor([3.0, 1.0])}
    assert logit_correction({}, {}, 0.5) is None
    torch.testing.assert_close(logit_correction({}, private, 0.5), torch.tensor([0.7, 0.3]).log())
    models = {PRIOR: {"global": torch.tensor([0.7, 0.3])}}
    torch.testing.assert_close(
        logit_correction(models, private, 0.5), torch.zeros(2)
    )  # equal to the training prior: nothing to correct


class TestCounting:
    @pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
    def test_counts_are_kept_and_other_private_state_stays(self, fleet):
        data = tiny_federation(3)
        private = {"c1": {"released": torch.ones(1)}}
        reports = fleet(data, private).execute(Plan(CountLabels(4), {c: Task() for c in data}))
        for client in data:
            assert (
                private[client][LABEL_COUNTS].tolist() == torch.bincount(data[client]["train"].y, minlength=4).tolist()
            )
            assert not reports[client].tensors and not reports[client].metrics and not reports[client].counts
        assert "released" in private["c1"]


class TestAdjustedLoss:
    def test_by_hand(self):
        """Logits (0, 0) and the prior (0.85, 0.15): the loss of class 1 is -log 0.15, its gradient (0.85, -0.85)."""
        program = AdjustedTraining(MODEL, lr=1.0, uniform_mix=0.3)
        zero = {k: torch.zeros_like(v) for k, v in MODEL.init(0).items()}
        state = program.begin(Task({"m": zero}), {LABEL_COUNTS: torch.tensor([5.0, 0.0])})
        batch = Batch(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), torch.ones(1), torch.tensor(0))
        after = program.step(state, batch)
        assert float(after["loss"][0]) == pytest.approx(-math.log(0.15))
        params = torch.cat([x.flatten() for x in program.current_model(after).values()]).tolist()
        # biases (-0.85, 0.85), the same weights for the first input, 0 for the second
        assert sorted(params) == pytest.approx(sorted([-0.85, 0.85, -0.85, 0, 0.85, 0]))

    def test_equal_classes_change_nothing(self):
        """With uniform_mix 1 or without label counts every logit has the same correction, which changes no gradient."""
        data, model = tiny_federation(2), load_model("linear", (6,), 4)
        trained = []
        for program in (
            LocalTraining(model),
            AdjustedTraining(model, uniform_mix=1.0),
            AdjustedTraining(model, uniform_mix=0.3),
        ):
            trained.append(PlainFleet(data).execute_one(program, "c1", Task({"m": model.init(1)})).tensors["model"])
        for other in trained[1:]:
            for k, x in trained[0].items():
                torch.testing.assert_close(other[k], x)

    @pytest.mark.parametrize("uniform_mix", [0, -1, 1.1])
    def test_bad_options(self, uniform_mix):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            AdjustedTraining(MODEL, uniform_mix=uniform_mix)


def estimated_counts(log_likelihood, prior, pseudocount, iterations):
    """Returns the expected class counts after this many iterations of EM from a prior."""
    for _ in range(iterations):
        counts = expected_counts(prior.log(), log_likelihood, torch.ones(len(log_likelihood)))
        prior = smoothed_prior(counts, pseudocount)
    return counts


class TestEstimate:
    def test_one_iteration_by_hand(self):
        """Two inputs: p(x|y) as (3 : 1) and (1 : 1). From equal classes the first is of class 0 with 3/4."""
        log_likelihoods = torch.tensor([[3.0, 1.0], [1.0, 1.0]]).log()
        torch.testing.assert_close(
            estimated_counts(log_likelihoods, torch.tensor([0.5, 0.5]), 1e-9, 1), torch.tensor([1.25, 0.75])
        )

    def test_certain_predictions_are_counted(self):
        log_likelihoods = torch.tensor([[0.0, -50.0], [0.0, -50.0], [-50.0, 0.0]])
        torch.testing.assert_close(
            estimated_counts(log_likelihoods, torch.tensor([0.5, 0.5]), 0.1, 20), torch.tensor([2.0, 1.0])
        )

    def test_a_skewed_prior_is_recovered(self):
        """Samples of two Gaussians, 9 of 10 from the second, with the true p(x|y): EM finds the maximum likelihood."""
        g = torch.Generator().manual_seed(0)
        y = (torch.rand(4000, generator=g) < 0.9).long()
        x = torch.randn(4000, generator=g) + 2.0 * y
        log_likelihoods = torch.stack([-(x**2) / 2, -((x - 2) ** 2) / 2], 1)
        counts = estimated_counts(log_likelihoods, torch.tensor([0.5, 0.5]), 0.1, 100)
        assert float(counts[1] / 4000) == pytest.approx(0.9, abs=0.02)

    def test_without_samples_all_counts_are_0(self):
        assert estimated_counts(torch.empty(0, 3), torch.full((3,), 1 / 3), 0.1, 5).tolist() == [0, 0, 0]


def test_a_client_with_label_counts_gets_a_prior_correction_and_an_unseen_client_gets_none():
    model = load_model("mlp", (6,), 4)
    method = build("shoal", Setting(model, rounds=2, cohort_size=3, batch_size=8))
    federation = tiny_federation(5)
    fleet = PlainFleet(federation)
    state = engine.run(method, fleet, rounds=2, seed=0).state
    x, models = federation["c1"]["test"].x, method.models_for(state, "c1")
    plain = model.predict(models["global"], x)
    assert torch.equal(method.predict(models, {}, x), plain)
    counts = torch.bincount(federation["c1"]["train"].y, minlength=4)
    prior = (counts + 0.1) / (counts.sum() + 0.4)
    expected = plain + prior.log() - models[PRIOR]["global"].log()
    torch.testing.assert_close(method.predict(models, fleet.private["c1"], x), expected)


class TestUnseenClients:
    def samples(self):
        """Returns samples of one class only, around its centre."""
        g = torch.Generator().manual_seed(1)
        return Samples(torch.randn(60, 6, generator=g), torch.full((60,), 3))

    def test_labels_are_not_available(self):
        seen_counts = {}

        class Spy:
            name, batchable, phases = "spy", True, ()

            def begin(self, task, private):
                return {}

            def end(self, task, state, counts):
                seen_counts.update(counts)
                return engine.Report(), None

        method = build("shoal", Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=3))
        engine.evaluate_unseen(
            replace(method, adaptation_program=Spy()), method.init(0), {"u": self.samples()}, True, num_inputs=20
        )
        assert seen_counts == {UNLABELLED_SPLIT: 20}
        inputs = engine.without_labels(self.samples(), "u", 20, 0)
        assert inputs.y.tolist() == [0] * 20

    def test_the_estimate_does_not_depend_on_labels(self):
        method = build("shoal", Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=3))
        state, (x, y) = method.init(0), self.samples()
        estimates = []
        for labels in (y, torch.zeros_like(y)):
            fleet = PlainFleet({"u": {UNLABELLED_SPLIT: Samples(x, labels)}})
            fleet.execute(
                Plan(
                    replace(method.adaptation_program, min_gain_nats=-1.0), {"u": Task(method.models_for(state, None))}
                )
            )
            estimates.append(fleet.private["u"])
        assert torch.equal(estimates[0][LABEL_COUNTS], estimates[1][LABEL_COUNTS])
        assert float(estimates[0][LABEL_COUNTS].sum()) == pytest.approx(60, rel=1e-4)

    def test_the_program_computes_the_same_as_the_function(self):
        model = load_model("mlp", (6,), 4)
        program, params = EstimatePrior(model, min_gain_nats=-1.0), model.init(3)
        x = self.samples().x
        fleet = PlainFleet({"u": {UNLABELLED_SPLIT: Samples(x, torch.zeros(60, dtype=torch.long))}})
        fleet.execute(Plan(program, {"u": Task({"global": params})}))
        even = torch.full((4,), 0.25)
        log_likelihoods = torch.log_softmax(model.predict(params, x), -1) - even.log()
        expected = estimated_counts(log_likelihoods, even, program.pseudocount, program.iterations)
        torch.testing.assert_close(fleet.private["u"][LABEL_COUNTS], expected, rtol=1e-4, atol=1e-4)

    def test_an_estimate_needs_the_minimum_gain(self):
        """By the initial model, no prior makes these inputs more likely by a nat."""
        model = load_model("mlp", (6,), 4)
        data = {"u": {UNLABELLED_SPLIT: Samples(self.samples().x, torch.zeros(60, dtype=torch.long))}}
        for min_gain, is_kept in ((-1.0, True), (1.0, False)):
            fleet = PlainFleet(data)
            fleet.execute(Plan(EstimatePrior(model, min_gain_nats=min_gain), {"u": Task({"global": model.init(3)})}))
            assert bool(fleet.private["u"][LABEL_COUNTS].sum()) == is_kept

    def test_few_inputs_without_skew_rarely_give_an_estimate(self):
        """Ten equally frequent classes and a correct model: an estimate only overfits. Twice its gain over all
        samples is about χ² with 9 degrees: above 13 for 1 in 6 with 20 inputs, 19 for 1 in 40 with 50."""
        model, num_estimates = load_model("linear", (10,), 10), {20: 0, 50: 0}
        right = {"head.weight": 4 * torch.eye(10), "head.bias": torch.zeros(10)}
        for n in num_estimates:
            for seed in range(40):
                g = torch.Generator().manual_seed(seed)
                x = 0.5 * torch.randn(n, 10, generator=g) + torch.eye(10)[torch.randint(0, 10, (n,), generator=g)]
                fleet = PlainFleet({"u": {UNLABELLED_SPLIT: Samples(x, torch.zeros(n, dtype=torch.long))}})
                fleet.execute(Plan(EstimatePrior(model), {"u": Task({"global": right})}))
                num_estimates[n] += bool(fleet.private["u"][LABEL_COUNTS].sum())
        assert num_estimates[20] <= 12 and num_estimates[50] <= 4, num_estimates

    def test_an_unreliable_estimate_replaces_an_earlier_one_by_no_counts(self):
        model = load_model("mlp", (6,), 4)
        data = {"u": {UNLABELLED_SPLIT: Samples(self.samples().x, torch.zeros(60, dtype=torch.long))}}
        fleet = PlainFleet(data, {"u": {LABEL_COUNTS: torch.tensor([9.0, 0, 0, 0])}})
        fleet.execute(Plan(EstimatePrior(model, min_gain_nats=1.0), {"u": Task({"global": model.init(3)})}))
        assert not logit_correction({}, fleet.private["u"], 0.1).any()

    def test_log_likelihood_gain_by_hand(self):
        """p(x|y) as (3 : 1); with (1, 0) instead of (1/2, 1/2) an input is 3 / 2 times as likely."""
        log_likelihoods, w = torch.tensor([[3.0, 1.0]]).log(), torch.ones(1)
        sure, even = torch.tensor([1.0, 1e-12]).log(), torch.tensor([0.5, 0.5]).log()
        assert float(log_likelihood_gain(sure, even, log_likelihoods, w)) == pytest.approx(math.log(1.5))

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ({"pseudocount": 0}, r"estimate\.pseudocount is 0; it must be above 0"),
            ({"iterations": 0}, r"estimate\.iterations is 0; it must be 1 or more"),
        ],
    )
    def test_bad_options(self, keys, message):
        with pytest.raises(UserError, match=message):
            EstimatePrior(MODEL, **keys)
