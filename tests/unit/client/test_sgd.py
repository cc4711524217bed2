import math

import pytest
import torch

from shoal.client.sgd import Sgd, clip_gradients, learning_rate
from shoal.errors import UserError


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "clip"), [(0, 0, 0), (0.9, 0, 0), (0, 0.01, 0), (0.5, 0.01, 0), (0.9, 0.01, 0.3)]
)
def test_agrees_with_torch(momentum, weight_decay, clip):
    g = torch.Generator().manual_seed(0)
    target = torch.randn(5, generator=g)
    theirs = torch.nn.Parameter(torch.zeros(5))
    optimiser = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    ours = {"w": torch.zeros(5)}
    sgd = Sgd(momentum, weight_decay, clip)
    velocity = sgd.init(ours)
    for _ in range(7):
        optimiser.zero_grad()
        ((theirs - target) ** 2).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        optimiser.step()
        gradients = {"w": 2 * (ours["w"] - target)}
        ours, velocity = sgd.update(ours, gradients, velocity, torch.tensor(0.1))
        assert torch.allclose(ours["w"], theirs.data, atol=1e-6)


def test_update_is_pure():
    params, gradients = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    sgd = Sgd(momentum=0.5, weight_decay=0.1, clip=0.1)
    velocity = sgd.init(params)
    sgd.update(params, gradients, velocity, torch.tensor(1.0))
    assert params["w"].tolist() == gradients["w"].tolist() == [1, 1]
    assert velocity["w"].tolist() == [0, 0]


def test_clip_by_hand():
    gradients = clip_gradients({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)  # norm 5 -> 1
    assert gradients["a"].item() == pytest.approx(0.6, abs=1e-5)
    assert gradients["b"].item() == pytest.approx(0.8, abs=1e-5)
    assert clip_gradients({"a": torch.tensor([0.5])}, 1.0)["a"].item() == 0.5


def test_schedules_by_hand():
    assert learning_rate("constant", 0.1, 7, 10) == 0.1
    assert learning_rate("cosine", 1.0, 0, 10) == 1.0
    assert learning_rate("cosine", 1.0, 5, 10, decay=0.2) == pytest.approx(0.2 + 0.8 / 2)
    assert learning_rate("exponential", 1.0, 5, 10, decay=0.01) == pytest.approx(0.1)
    thirds = [learning_rate("step", 1.0, r, 9, decay=0.01) for r in (0, 2, 3, 5, 6, 8)]
    assert thirds == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    warm = [learning_rate("warmup-cosine", 1.0, r, 40) for r in range(3)]
    assert warm == pytest.approx([0.5, 1.0, 1.0])
    assert math.isclose(learning_rate("warmup-cosine", 1.0, 21, 40, decay=0.1), 0.55)


def test_unknown_schedule():
    with pytest.raises(UserError, match=r"schedule 'linear'.*cosine"):
        learning_rate("linear", 0.1, 0, 1)
