import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from shoal.errors import UserError
from shoal.models import load_model
from shoal.models.model import Model

KEY = torch.tensor(1)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("mlp", (1, 28, 28), 52_500),  # 784*64+64 + 64*30+30 + 30*10+10
        ("mlp-dropout", (1, 28, 28), 52_500),
        ("cnn-cifar", (3, 32, 32), 73_418),
        ("cnn-fedavg", (1, 28, 28), 582_026),
        ("cnn-1d", (6, 64), 65_258),  # 32*(6*5+1) + 64*(32*5+1) + 64*(13*64+1) + 10*65
        ("linear", (784,), 7_850),
        ("resnet18", (3, 32, 32), 11_173_962),
    ],
)
def test_parameter_counts(name, shape, parameters):
    assert load_model(name, shape, 10).num_parameters == parameters


def test_init_follows_from_the_seed_alone():
    model = load_model("mlp", (4,), 3)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    a, b, c = model.init(1), model.init(1), model.init(2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])
    assert list(a) == sorted(a)


def test_head_is_the_last_layer():
    assert load_model("cnn-fedavg", (1, 28, 28), 10).head == ("head.weight", "head.bias")


def test_dropout_needs_a_key_and_scales():
    model = load_model("mlp-dropout", (4,), 3)
    params, x = model.init(0), torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    served = model.predict(params, x)
    assert torch.equal(served, model.predict(params, x))
    first, _ = model.forward(params, x, torch.tensor(1))
    again, _ = model.forward(params, x, torch.tensor(1))
    other, _ = model.forward(params, x, torch.tensor(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    many = torch.stack([model.forward(params, x, torch.tensor(k))[0] for k in range(300)]).mean(0)
    assert float((many - served).abs().mean()) < 0.1  # the head is linear, so dropout is nearly unbiased


def test_batch_norm_updates_its_buffers_without_touching_the_input():
    model = load_model("resnet18-batchnorm", (3, 8, 8), 2)
    assert not model.batchable
    params = model.init(0)
    before = {k: v.clone() for k, v in params.items()}
    _, buffers = model.forward(params, torch.randn(4, 3, 8, 8) + 1, KEY)
    assert all(torch.equal(before[k], v) for k, v in params.items())
    assert buffers["norm.num_batches_tracked"] == 1
    assert not torch.equal(buffers["norm.running_mean"], params["norm.running_mean"])
    assert set(buffers) | set(model.trainable) == set(params)


def test_group_norm_is_the_default():
    assert load_model("resnet18", (3, 8, 8), 2).batchable


def test_forward_has_the_gradient_of_autograd():
    model = load_model("cnn-fedavg", (1, 16, 16), 3)
    params = model.init(0)
    x = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    gradients = grad(lambda p: model.forward(p, x, KEY)[0].square().sum())(params)
    tensors = {k: v.clone().requires_grad_() for k, v in params.items()}
    model.forward(tensors, x, KEY)[0].square().sum().backward()
    for k, v in tensors.items():
        assert torch.allclose(gradients[k], v.grad, atol=1e-5)


@pytest.mark.parametrize(("name", "shape"), [("cnn-cifar", (3, 32, 32)), ("cnn-1d", (6, 64))])
def test_stacked_networks_agree_with_single_ones(name, shape):
    model = load_model(name, shape, 4)
    params = [model.init(i) for i in range(3)]
    stacked = {k: torch.stack([p[k] for p in params]) for k in params[0]}
    x = torch.randn(3, 2, *shape)
    together = vmap(model.predict)(stacked, x)
    for i, p in enumerate(params):
        assert torch.allclose(together[i], model.predict(p, x[i]), atol=1e-5)

    def gradient(p, x):
        return grad(lambda p: model.forward(p, x, KEY)[0].square().sum())(p)

    gradients = vmap(gradient)(stacked, x)
    for i, p in enumerate(params):
        for k, v in gradient(p, x[i]).items():
            assert torch.allclose(gradients[k][i], v, atol=1e-5)


class TwoLayers(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.out = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.out(x)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x)


def test_own_models():
    assert load_model(f"{__name__}:TwoLayers", (4,), 3).num_parameters == 15
    assert load_model(f"{__name__}:Fixed", (4,), 3).num_parameters == 15


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mpl", (4,), "'mpl' is not known; did you mean mlp"),
        ("cnn-cifar", (64,), r"takes images of at least 18 x 18 pixels, not inputs of shape \(64,\)"),
        (
            "cnn-1d",
            (1, 8, 8),
            r"takes windows of shape \(channels, length\).* at least 16, not inputs of shape \(1, 8, 8\)",
        ),
        ("cnn-1d", (6, 15), r"at least 16, not inputs of shape \(6, 15\)"),
        ("no.such.module:Net", (4,), "cannot be imported"),
        ("math:pi", (4,), "is not a class or function"),
        (f"{__name__}:Fixed", (5,), r"cannot take inputs of shape \(5,\)"),
    ],
)
def test_bad_models(name, shape, message):
    with pytest.raises(UserError, match=message):
        load_model(name, shape, 3)


def test_wrong_number_of_outputs():
    with pytest.raises(UserError, match=r"outputs of shape \(2, 3\) for 2 samples; it must be \(2, 7\)"):
        load_model(f"{__name__}:Fixed", (4,), 7)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.c = self.a

    def forward(self, x):
        return self.b(self.c(self.a(x)))


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.out(x) * self.scale


class Empty(nn.Module):
    def forward(self, x):
        return x[:, :3]


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        raise KeyError("width")


def one_argument(shape):
    return Fixed()


def no_module():
    return 3


def two_defaults(hidden=16, depth=1):
    return Fixed()


def test_parameters_with_defaults_are_not_passed():
    assert load_model(f"{__name__}:two_defaults", (4,), 3).num_parameters == 15


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Tied", "ties parameters"),
        ("Loose", "buffer 'scale' is not persistent"),
        ("Empty", "has no parameters to train"),
        ("Failing", "cannot be made: KeyError: 'width'"),
        ("one_argument", "needs 1 arguments"),
        ("no_module", "made a int"),
    ],
)
def test_models_that_could_not_be_federated(name, message):
    with pytest.raises(UserError, match=message):
        load_model(f"{__name__}:{name}", (4,), 3)


@pytest.mark.parametrize("name", ["cnn-cifar", "cnn-fedavg"])
def test_convolutional_networks_are_the_textbook_ones(name):
    """Max pooling before bias and ReLU changes neither outputs nor gradients."""
    from torch.nn import functional as F

    net = load_model(name, (3, 32, 32), 10).factory()

    def textbook(x):
        for conv in [m for m in net.children() if isinstance(m, torch.nn.Conv2d)]:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return net.head(F.relu(net.fc(x.flatten(1))))

    x = torch.randn(5, 3, 32, 32)
    assert torch.allclose(net(x), textbook(x), atol=1e-6)
    gradients = [torch.autograd.grad(f(x).square().sum(), list(net.parameters())) for f in (net, textbook)]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_network_for_windows_takes_the_shortest_window():
    model = load_model("cnn-1d", (1, 16), 3)
    assert model.head == ("head.weight", "head.bias")
    assert model.relu_index("last") == 2
    assert not [k for k in model.init(0) if k not in model.trainable]  # no buffers


def test_the_network_for_windows_is_the_textbook_one():
    from torch.nn import functional as F

    net = load_model("cnn-1d", (6, 64), 6).factory()
    x = torch.randn(5, 6, 64)
    hidden = F.max_pool1d(F.relu(net.conv2(F.max_pool1d(F.relu(net.conv1(x)), 2))), 2)
    assert torch.equal(net(x), net.head(F.relu(net.fc(hidden.flatten(1)))))


class SlowNetwork(nn.Module):
    """Lets two calls overlap: the first waits until the second has begun, and the second until the first has ended."""

    def __init__(self, events):
        super().__init__()
        self.events = events
        self.scale = nn.Parameter(torch.zeros(2))

    def __deepcopy__(self, memo):
        return SlowNetwork(self.events)

    def forward(self, x):
        first, second, left = self.events
        if x[0, 0] == 1:
            first.set()
            assert second.wait(5)
        if x[0, 0] == 2:
            second.set()
            assert left.wait(5)
        return x * self.scale


@pytest.mark.parametrize("call", ["predict", "forward"])
def test_threads_do_not_see_each_others_weights(call):
    first, _, left = events = [threading.Event() for _ in range(3)]
    model = Model("overlapping", lambda: SlowNetwork(events), (2,), 2)

    def outputs(scale, x):
        params, inputs = {"scale": torch.full((2,), scale)}, torch.full((1, 2), x)
        if call == "predict":
            return model.predict(params, inputs).tolist()
        return model.forward(params, inputs, torch.tensor([0, 0]))[0].tolist()

    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(outputs, 3.0, 1.0)
        assert first.wait(5)
        late = threads.submit(outputs, 5.0, 2.0)
        assert early.result(5) == [[3.0, 3.0]]
        left.set()
        assert late.result(5) == [[10.0, 10.0]]
