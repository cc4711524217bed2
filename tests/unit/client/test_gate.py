"""The gate: its weights by hand, what it runs, and the program that trains it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal import tree
from shoal.client.adam import Adam
from shoal.client.gate import FitGate, Gate, TrainGate, confidence_weighted_logits, gated_predict
from shoal.client.model_choice import ChooseModel
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.fleet.vector import VectorFleet
from shoal.models import load_model
from shoal.types import Batch, Phase, Plan, Report, Task

MODEL = load_model("mlp", (6,), 4)
EVERY_MODEL = Gate(top=0, shortlist=0)


def experts(count, scale=1.0):
    return {f"expert-{k}": {n: scale * x for n, x in MODEL.init(k).items()} for k in range(count)}


def test_adam_is_torchs():
    p = torch.tensor([1.0, -2.0], requires_grad=True)
    theirs, ours, state = torch.optim.Adam([p], lr=0.1), {"p": p.detach().clone()}, Adam(0.1).init({"p": p.detach()})
    for _ in range(5):
        theirs.zero_grad()
        (p**2).sum().backward()
        theirs.step()
        ours, state = Adam(0.1).update(ours, {"p": 2 * ours["p"]}, state)
    assert torch.allclose(ours["p"], p.detach(), atol=1e-6)


class TestWeights:
    def test_by_hand(self):
        # priors 1/4, 3/4; confidences: log(e^0 + e^0) = log 2 and log(e^log3 + e^0) = log 4: weights as 2/4 to 12/4
        scores = torch.tensor([[0.0, math.log(3)]])
        logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]])
        weights = Gate().log_weights(scores, logits).exp()
        assert weights[0].tolist() == pytest.approx([1 / 7, 6 / 7])
        assert Gate(calibrate=False).log_weights(scores, logits).exp()[0].tolist() == pytest.approx([0.25, 0.75])
        # logits: 6/7 of log 3, and 0; probabilities: 1/7 of one half and 6/7 of three quarters
        assert Gate().mixture_logits(weights.log(), logits)[0].tolist() == pytest.approx([6 / 7 * math.log(3), 0.0])
        mixed = Gate(mix="probabilities").mixture_logits(weights.log(), logits).exp()
        assert mixed[0].tolist() == pytest.approx([1 / 14 + 18 / 28, 1 / 14 + 6 / 28])

    def test_a_temperature(self):
        # T = 2 halves the logits: log(e^(log9 / 2) + 1) = log 4 against log 2
        logits = torch.tensor([[[0.0, 0.0], [math.log(9), 0.0]]])
        weights = Gate(temperature=2.0).log_weights(torch.zeros(1, 2), logits).exp()
        assert weights[0].tolist() == pytest.approx([1 / 3, 2 / 3])

    def test_probabilities_at_temperature_one_collapse(self):
        """The confidence cancels every model's own normalisation."""
        g = torch.Generator().manual_seed(0)
        scores, logits = torch.randn(5, 3, generator=g), torch.randn(5, 3, 4, generator=g)
        gate = replace(EVERY_MODEL, mix="probabilities")
        mixed = gate.mixture_logits(gate.log_weights(scores, logits), logits)
        expected = torch.logsumexp(scores[..., None] + logits, dim=1).log_softmax(-1)
        assert torch.allclose(mixed, expected, atol=1e-6)

    def test_the_own_model_and_two_experts(self):
        g = torch.Generator().manual_seed(1)
        scores, logits = torch.randn(50, 6, generator=g), 3 * torch.randn(50, 6, 4, generator=g)
        weights = Gate(shortlist=0).log_weights(scores, logits).exp()
        assert ((weights > 0).sum(1) == 3).all()
        assert (weights[:, 0] > 0).all()
        assert torch.allclose(weights.sum(1), torch.ones(50))
        corrected = scores.log_softmax(1) + torch.logsumexp(logits, -1)
        largest = corrected[:, 1:].topk(2).indices + 1
        assert (weights.gather(1, largest) > 0).all()

    def test_a_shortlist_is_by_priors(self):
        # the third expert is by far the most confident, but has the smallest prior of four: with three it is not run
        scores = torch.tensor([[0.0, 3.0, 2.0, 0.0, 1.0]])
        logits = torch.zeros(1, 5, 2)
        logits[0, 3] = 50.0
        assert (Gate(shortlist=0).log_weights(scores, logits).exp() > 0)[0].tolist() == [1, 1, 0, 1, 0]
        assert (Gate(shortlist=3).log_weights(scores, logits).exp() > 0)[0].tolist() == [1, 1, 1, 0, 0]
        assert Gate(shortlist=3).models_to_run(scores)[0].tolist() == [1, 1, 1, 0, 1]
        assert Gate(shortlist=1, top=2).models_to_run(scores)[0].tolist() == [1, 1, 1, 0, 0]  # never fewer than top
        assert Gate(calibrate=False).models_to_run(scores)[0].tolist() == [1, 1, 1, 0, 0]

    def test_denoise_drops_experts_that_are_less_confident_than_the_own_model(self):
        # confidences log 2, log 4 and log 1.1: the last is less sure than the own model's; priors are equal
        logits = torch.tensor([[[0.0, 0.0], [math.log(3), 0.0], [math.log(0.1), 0.0]]])
        weights = Gate(denoise=True, calibrate=False).log_weights(torch.zeros(1, 3), logits).exp()
        assert weights[0].tolist() == pytest.approx([0.5, 0.5, 0.0])

    def test_without_priors_confidence_chooses_among_all(self):
        logits = torch.zeros(1, 6, 2)
        logits[0, 5] = 9.0
        assert (Gate(prior="uniform").log_weights(torch.zeros(1, 6), logits).exp() > 0)[0].tolist()[5]

    def test_the_first_of_equal_models_is_preferred(self):
        weights = Gate(calibrate=False, shortlist=0).log_weights(torch.zeros(2, 6), torch.zeros(2, 6, 2)).exp()
        assert (weights > 0).tolist() == [[True, True, True, False, False, False]] * 2

    def test_large_logits(self):
        # sums of e^200 are beyond float32, their logs are not; the gap of 1 decides: 1 / (1 + e) and e / (1 + e)
        logits = torch.tensor([[[200.0, 0.0], [201.0, 0.0]]])
        assert torch.exp(logits).sum().isinf()
        weights = Gate().log_weights(torch.zeros(1, 2), logits).exp()
        assert weights[0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])

    def test_gradients_are_finite_and_only_models_that_count_have_one(self):
        scores = torch.zeros(1, 5, requires_grad=True)
        logits = torch.tensor([[[0.0, 1.0]] * 2 + [[3.0, 0.0]] * 2 + [[-9.0, -9.0]]])
        gate = Gate(shortlist=0)
        gate.mixture_logits(gate.log_weights(scores, logits), logits)[0, 0].backward()
        assert scores.grad.isfinite().all()
        assert (scores.grad[0].abs() > 1e-6).tolist() == [True, False, True, True, False]

    def test_a_uniform_prior_has_no_network(self):
        gate = Gate(prior="uniform")
        params = {k: x + 1 for k, x in gate.init(6, 3, 0).items()}
        assert (gate.scores(params, torch.randn(4, 6)) == 0).all()

    @pytest.mark.parametrize(("key", "value"), [("hidden", 0), ("top", -1), ("shortlist", -1), ("temperature", 0.0)])
    def test_refuses(self, key, value):
        with pytest.raises(UserError, match=f"gate.{key} is {value}"):
            Gate(**{key: value})


def program(**kw):
    personal = LocalTraining(MODEL, epochs=2, batch_size=8, sensitivity="high", name="private")
    start, fit = kw.pop("start", "warm"), FitGate(**{"model": MODEL, "gate": Gate()} | kw)
    return TrainGate(fit, personal, ChooseModel(MODEL, "hits", "val/low"), start)


class TestTraining:
    def test_at_first_all_models_count_the_same(self):
        gate = Gate().init(6, 3, 0)
        assert (Gate().scores(gate, torch.randn(7, 6)) == 0).all()

    def test_by_torch(self, tiny):
        """One epoch on frozen models, against an nn.Module, torch's optimiser and no cache of the models' logits."""
        data, task = tiny["c3"], Task(experts(2), {}, 5)
        p = program(epochs=1, batch_size=1000, gate=replace(EVERY_MODEL, mix="probabilities"))
        _, private = run_program(p, task, data, {})
        first = p.fit.gate.init(6, 3, 5)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        net.load_state_dict(dict(zip(net.state_dict(), first.values(), strict=True)))
        x, y = data["train"]
        models = [private["model"], *task.models.values()]
        logits = torch.stack([MODEL.predict(m, x) for m in models], 1)
        weights = net(x).softmax(-1) * logits.exp().sum(-1)
        weights = weights / weights.sum(-1, keepdim=True)
        loss = nn.functional.nll_loss((weights[..., None] * logits.softmax(-1)).sum(1).log(), y)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.005, eps=1e-4)
        loss.backward()
        optimiser.step()
        for ours, theirs in zip(private["gate"].values(), net.state_dict().values(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)

    def test_the_own_model_goes_on_from_the_best_expert(self, tiny):
        data, task = tiny["c4"], Task(experts(3), {}, 5)
        low = data["val/low"]
        hits = [int((MODEL.predict(m, low.x).argmax(1) == low.y).sum()) for m in task.models.values()]
        losses = [float(nn.functional.cross_entropy(MODEL.predict(m, low.x), low.y)) for m in task.models.values()]
        best = min(range(3), key=lambda k: (-hits[k], losses[k]))
        p = program()
        _, private = run_program(p, task, data, {})
        alone, _ = run_program(p.personal_training, Task({"m": experts(3)[f"expert-{best}"]}, {}, 5), data, {})
        assert tree.max_abs_difference(private["model"], alone.tensors["model"]) < 1e-7

    def test_without_a_network_nothing_is_trained(self, tiny):
        p = program(gate=Gate(prior="uniform"))
        assert len(p.phases) == 2
        _, private = run_program(p, Task(experts(4), {}, 5), tiny["c2"], {})
        first = p.fit.gate.init(6, 5, 5)
        assert tree.max_abs_difference(private["gate"], first) == 0

    def test_cold_keeps_the_own_model(self, tiny):
        mine = MODEL.init(77)
        _, private = run_program(program(start="cold"), Task(experts(2), {}, 5), tiny["c2"], {"model": mine})
        assert tree.max_abs_difference(private["model"], mine) == 0
        assert any(x.any() for x in private["gate"].values())

    def test_nothing_is_reported(self, tiny):
        report, _ = run_program(program(), Task(experts(2), {}, 5), tiny["c2"], {})
        assert replace(report, flops=0) == Report()

    def test_models_are_run_once_for_a_sample(self, tiny):
        """More epochs of gate training cost only the gate's operations."""
        num_samples, flops = len(tiny["c3"]["train"].y), {}
        for epochs in (1, 2, 11):
            report, _ = run_program(program(epochs=epochs, batch_size=1000), Task(experts(2), {}, 5), tiny["c3"], {})
            flops[epochs] = report.flops
        forward = 2 * (6 * 64 + 64 * 30 + 30 * 4)  # one sample through one model
        per_epoch = flops[2] - flops[1]
        assert flops[11] - flops[1] == 10 * per_epoch
        assert per_epoch < 0.2 * 3 * forward * num_samples

    def test_fleets_agree_on_clients_with_unequal_numbers_of_experts(self, tiny):
        tasks = {c: Task(experts(1 + i % 3), {}, i) for i, c in enumerate(tiny)}
        plain, vector = PlainFleet(tiny), VectorFleet(tiny)
        for fleet in (plain, vector):
            fleet.execute(Plan(program(), tasks))
        assert tree.max_abs_difference(dict(plain.private), dict(vector.private)) < 1e-5
        assert not vector._unstackable_programs

    @pytest.mark.parametrize(("key", "value"), [("epochs", -1), ("batch_size", 0), ("lr", 0.0)])
    def test_refuses(self, key, value):
        with pytest.raises(UserError, match=f"gate.{key} is {value}"):
            program(**{key: value})


class TestPrediction:
    def trained(self, tiny, num_experts, **kw):
        models, gate = experts(num_experts, 4.0), Gate(**kw)
        _, private = run_program(program(gate=gate), Task(models, {}, 5), tiny["c5"], {})
        return models, private, gate

    def test_without_a_gate_confidence_decides(self, tiny):
        models, x = experts(3), tiny.central.x
        logits = torch.stack([MODEL.predict(m, x) for m in models.values()], 1)
        predicted = gated_predict(MODEL, Gate())(models, {}, x)
        assert torch.allclose(predicted, confidence_weighted_logits(logits))
        weights = logits.exp().sum(-1) / logits.exp().sum((-1, -2))[:, None]
        assert torch.allclose(predicted, (weights[..., None] * logits).sum(1), atol=1e-6)

    def test_a_gate_for_as_many_other_experts_is_not_used(self, tiny):
        models, private, gate = self.trained(tiny, 3)
        other = dict(zip(models, reversed(models.values()), strict=True))
        x = tiny.central.x
        logits = torch.stack([MODEL.predict(m, x) for m in (private["model"], *other.values())], 1)
        assert torch.allclose(gated_predict(MODEL, gate)(other, private, x), confidence_weighted_logits(logits))

    def test_a_gate_for_other_experts_is_not_used(self, tiny):
        models, private, gate = self.trained(tiny, 3)
        two = dict(list(models.items())[:2])
        x = tiny.central.x
        logits = torch.stack([MODEL.predict(m, x) for m in (private["model"], *two.values())], 1)
        assert torch.allclose(gated_predict(MODEL, gate)(two, private, x), confidence_weighted_logits(logits))


def test_inputs_are_precomputed_once_for_each_sample(tiny):
    """The program sums precomputed values of its samples: each sample counts once an epoch, in batches of any size."""

    class Sum:
        name, batchable = "sum", True

        @property
        def phases(self):
            return (Phase("train", 2, 4, self.step, precompute=lambda state, x: x.flatten(1) @ state["w"]),)

        def begin(self, task, private):
            return {"w": torch.arange(12.0).reshape(6, 2), "total": torch.zeros(2)}

        def step(self, state, batch: Batch):
            return state | {"total": state["total"] + (batch.x * batch.w[:, None] * batch.y[:, None]).sum(0)}

        def end(self, task, state, counts):
            return Report({"total": {"x": state["total"]}}), None

    plan = Plan(Sum(), {c: Task() for c in tiny})
    for fleet in (PlainFleet(tiny), VectorFleet(tiny)):
        for client, report in fleet.execute(plan).items():
            x, y = tiny[client]["train"]
            expected = 2 * (x @ torch.arange(12.0).reshape(6, 2) * y[:, None]).sum(0)
            assert torch.allclose(report.tensors["total"]["x"], expected, rtol=1e-4)
            assert report.flops == 2 * len(y) * 6 * 2  # computed once, not once an epoch
