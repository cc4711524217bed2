"""Noise on sparsity vectors: sensitivities and guarantees by hand, and what a client releases."""

import math
from dataclasses import dataclass

import pytest
import torch
from federations import tiny_federation
from torch import nn

from shoal import engine
from shoal.client.gaussian_mechanism import epsilon
from shoal.client.probe import LossProbe
from shoal.client.sparsity import MeasureSparsity, halves_sensitivity, range_sensitivity
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.experiment.result import privacy_guarantees, privacy_report
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.fedavg import one_model_method
from shoal.models import load_model
from shoal.models.model import Model
from shoal.stages.query import QueryClients
from shoal.stages.select import SelectRandom
from shoal.types import Plan, Samples, Task


class Four(nn.Module):
    """Four channels, each of them zero where the only feature is not positive."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


FOUR = Model("four", Four, (1,), 2)


def program(epochs=0, noise=0.0, model=FOUR):
    return MeasureSparsity(LocalTraining(model, epochs=epochs, batch_size=8), noise_std=noise)


def halves(values):
    params = FOUR.init(0) | {"first.weight": torch.ones(4, 1), "first.bias": torch.zeros(4)}
    data = {"a": {"train": Samples(torch.tensor(values)[:, None], torch.zeros(len(values), dtype=torch.int64))}}
    report = PlainFleet(data).execute(Plan(program(), {"a": Task({"m": params})}))["a"]
    return report.tensors["sparsity"]["s"][2:]


class TestSensitivity:
    @pytest.mark.parametrize(
        ("num_samples", "replaced", "distance"),
        [
            # 1 in each of 4 channels of a mean over 3 samples: sqrt(4) / 3. The halves of 7 samples have 4 and 3.
            (6, 0, 2 / 3),
            (6, 3, 2 / 3),
            (7, 0, 2 / 4),
            (7, 1, 2 / 3),
        ],
    )
    def test_one_sample_moves_the_halves_by_the_sensitivity_at_most(self, num_samples, replaced, distance):
        other = [1.0] * num_samples
        other[replaced] = -1.0
        moved = float((halves([1.0] * num_samples) - halves(other)).norm())
        assert moved == pytest.approx(distance)
        assert moved <= halves_sensitivity(4, num_samples) * (1 + 1e-6)

    def test_a_single_sample_is_released_twice_with_the_same_noise(self):
        """The second vector reveals nothing more, and the one noisy vector moves by sqrt(4)."""
        one, other = program(noise=0.1).release_vectors(torch.full((3, 4), 0.5), num_samples=1, seed=0)[2:]
        assert torch.equal(one, other)
        assert halves_sensitivity(4, 1) == 2.0

    def test_the_bounds_are_reached(self):
        assert halves_sensitivity(4, 6) == pytest.approx(2 / 3)
        assert halves_sensitivity(4, 7) == pytest.approx(2 / 3)
        assert halves_sensitivity(4, 1) == pytest.approx(2)
        assert float((halves([1.0] * 6) - halves([-1.0] * 6)).norm()) == pytest.approx(range_sensitivity(4, 2))
        assert range_sensitivity(4, 3) == pytest.approx(math.sqrt(12))


class TestGuarantee:
    def test_by_hand(self):
        # the smallest client has 20 samples: halves of 10, sqrt(4) / 10 = 0.2 in all; both halves at most sqrt(8) apart
        guarantee = program(noise=0.1).privacy_guarantee([40, 20])
        assert guarantee["sigma"] == 0.1
        assert guarantee["smallest_client"] == 20
        assert guarantee["record_epsilon"] == pytest.approx(epsilon(1.0, 2.0))
        assert guarantee["record_epsilon_without_adaptation"] == guarantee["record_epsilon"]
        assert guarantee["local_epsilon"] == pytest.approx(epsilon(0.1, math.sqrt(8)))

    def test_the_adapted_vector_is_bounded_only_by_the_range_of_fractions(self):
        # the adapted vector may move by sqrt(4) = 2 beside the halves' 0.2; three vectors at most sqrt(12) apart
        guarantee = program(epochs=1, noise=0.1).privacy_guarantee([40, 20])
        assert guarantee["record_epsilon"] == pytest.approx(epsilon(0.1, math.sqrt(4 + 0.04)))
        assert guarantee["record_epsilon_without_adaptation"] == pytest.approx(epsilon(1.0, 2.0))
        assert guarantee["local_epsilon"] == pytest.approx(epsilon(0.1, math.sqrt(12)))

    def test_a_client_releases_once_for_any_number_of_tasks(self):
        assert program(noise=0.1).privacy_guarantee([20], num_tasks=9) == program(noise=0.1).privacy_guarantee([20])
        assert program(noise=0.1).privacy_guarantee([20])["releases"] == 1

    def test_more_noise_and_more_samples_protect_better(self):
        by_noise = [program(noise=n).privacy_guarantee([20])["record_epsilon"] for n in (0.05, 0.1, 0.2)]
        by_size = [program(noise=0.1).privacy_guarantee([n])["record_epsilon"] for n in (10, 20, 200)]
        adapted = [program(epochs=1, noise=0.1).privacy_guarantee([n])["record_epsilon"] for n in (200, 20_000)]
        assert by_noise == sorted(by_noise, reverse=True)
        assert by_size == sorted(by_size, reverse=True)
        assert adapted[0] == pytest.approx(adapted[1], rel=0.01)

    def test_no_guarantee_without_noise(self):
        assert program().privacy_guarantee([20]) == {}
        with pytest.raises(UserError, match=r"represent\.noise_std is -0\.1"):
            program(noise=-0.1)


class TestRelease:
    exact = torch.full((3, 4000), 0.5)

    @pytest.mark.parametrize("num_samples", [8, 9])
    def test_the_vector_of_all_samples_is_the_mean_of_the_noisy_halves(self, num_samples):
        released = program(epochs=1, noise=0.05).release_vectors(self.exact, num_samples, seed=3)
        adapted, received, one, other = released
        larger = (num_samples + 1) // 2
        assert torch.allclose(received, (larger * one + (num_samples - larger) * other) / num_samples, atol=1e-6)
        for vector in (adapted, one, other):
            assert float((vector - 0.5).std()) == pytest.approx(0.05, rel=0.05)  # s.e. 1 / sqrt(8000) = 1.1 %
        assert abs(float(torch.corrcoef(torch.stack([adapted, one]))[0, 1])) < 0.06  # s.e. 0.016

    def test_without_adaptation_the_first_vector_has_no_noise_of_its_own(self):
        adapted, received, *_ = program(noise=0.05).release_vectors(self.exact, 8, seed=3)
        assert torch.equal(adapted, received)

    def test_fractions_stay_fractions(self):
        released = program(epochs=1, noise=0.5).release_vectors(torch.zeros(3, 100), 8, seed=0)
        assert released.min() == 0
        assert released.max() <= 1

    @pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
    def test_noise_is_released_once(self, tiny, fleet):
        """For a second task with another seed a client sends the same vectors: fresh noise could be averaged away."""
        model = load_model("mlp", (6,), 4)
        noisy, running = program(epochs=1, noise=0.1, model=model), fleet(tiny)

        def sparsities(running, seed):
            tasks = {c: Task({"m": model.init(0)}, {}, seed) for c in tiny}
            return {c: r.tensors["sparsity"]["s"] for c, r in running.execute(Plan(noisy, tasks)).items()}

        first, second, other = sparsities(running, 1), sparsities(running, 2), sparsities(fleet(tiny), 2)
        plain = sparsities(PlainFleet(tiny), 1)
        for c in tiny:
            assert torch.equal(first[c], second[c])
            assert not torch.equal(first[c], other[c])
            assert torch.allclose(first[c], plain[c], atol=1e-5)


@dataclass(frozen=True)
class VagueLoss(LossProbe):
    def privacy_guarantee(self, num_train_samples, num_tasks):
        return {"record_epsilon": 100.0 * num_tasks / min(num_train_samples)}


def vague(setting):
    return one_model_method(setting, "vague", QueryClients(VagueLoss(setting.model), one_model_for), SelectRandom())


@pytest.mark.parametrize(("method", "expected"), [(vague, 100.0), ("fedavg", None)])
def test_a_run_reports_the_guarantees_of_its_programs(method, expected):
    federation = tiny_federation(5, (6,))
    experiment = assemble(Job(method="own", model="mlp", rounds=1, cohort=2, batch_size=8), method, federation)
    result = engine.run(experiment.method, make_fleet(experiment), rounds=1, seed=0, central_samples=federation.central)
    report = privacy_report(experiment, result.state, privacy_guarantees(experiment))
    smallest = int(federation.samples_per_client("train").min())
    assert report == ({"privacy": {"record_epsilon": expected / smallest}} if expected else {})
