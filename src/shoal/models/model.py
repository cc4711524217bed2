"""A network as pure functions: `init(seed)`, `predict(params, x)`, `forward(params, x, key)`."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.errors import UserError, import_callable, look_up
from shoal.models.cnn import CnnCifar, CnnFedAvg
from shoal.models.mlp import Linear, Mlp
from shoal.models.rectified import RecordReluOutputs, relu_modules
from shoal.models.resnet import ResNet18
from shoal.types import Params

NetworkFactory = Callable[..., nn.Module]

NETWORKS: dict[str, NetworkFactory] = {
    "mlp": Mlp,
    "mlp-dropout": partial(Mlp, dropout=0.5),
    "linear": Linear,
    "cnn-cifar": CnnCifar,
    "cnn-fedavg": CnnFedAvg,
    "resnet18": ResNet18,
    "resnet18-batchnorm": partial(ResNet18, norm="batch"),
}


def model_names() -> tuple[str, ...]:
    return tuple(NETWORKS)


class _PerThreadNetworks(threading.local):
    """A thread's own copies of a network, for each mode that it calls: a call with other weights puts them into the
    module while it lasts, and the mode is a flag on it."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    @cached_property
    def training(self) -> nn.Module:
        return copy.deepcopy(self._net).train()

    @cached_property
    def serving(self) -> nn.Module:
        return copy.deepcopy(self._net).eval()


class Model:
    """One network for one kind of input. It holds no weights that matter: all functions take them."""

    def __init__(
        self,
        name: str,
        factory: Callable[[], nn.Module],
        input_shape: tuple[int, ...],
        num_classes: int,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.name, self.factory, self.input_shape, self.num_classes = name, factory, input_shape, num_classes
        self._net = self._check_network(self._build_network(0))  # never called itself
        self._networks = _PerThreadNetworks(self._net)
        self.trainable = tuple(k for k, p in self._net.named_parameters() if p.requires_grad)
        self.takes_key = "key" in inspect.signature(self._net.forward).parameters
        self._check_output()

    def _build_network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # layers draw their first weights from the global generator
            torch.default_generator.manual_seed(seed)
            try:
                return self.factory()
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"model {self.name} cannot be made: {type(error).__name__}: {error}") from error

    def _check_network(self, net: nn.Module) -> nn.Module:
        if not isinstance(net, nn.Module):
            raise UserError(f"model {self.name} made a {type(net).__name__}; it must make a torch.nn.Module")
        parameters = dict(net.named_parameters(remove_duplicate=False))
        if not any(p.requires_grad for p in parameters.values()):
            raise UserError(f"model {self.name} has no parameters to train")
        if len(parameters) != len(dict(net.named_parameters())):
            raise UserError(f"model {self.name} ties parameters to each other; they must be separate to be averaged")
        unsaved_buffers = {k for k, _ in net.named_buffers()} - set(net.state_dict())
        if unsaved_buffers:
            raise UserError(
                f"model {self.name}: buffer {min(unsaved_buffers)!r} is not persistent; it could not be sent to clients"
            )
        return net

    def _check_output(self) -> None:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                shape = tuple(self._networks.serving(torch.zeros(2, *self.input_shape)).shape)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"model {self.name} cannot take inputs of shape {self.input_shape}: {error}") from error
        if shape != (2, self.num_classes):
            raise UserError(
                f"model {self.name} gives outputs of shape {shape} for 2 rows; it must be (2, {self.num_classes})"
            )

    def init(self, seed: int) -> Params:
        """First weights, by sorted names: the order that a stored or received model has."""
        state = self._build_network(seed).state_dict()
        return {k: state[k].detach().clone().to(self.device) for k in sorted(state)}

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Logits as served: no dropout, running statistics."""
        return functional_call(self._networks.serving, params, (x,), tie_weights=False, strict=True)

    def forward(self, params: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        """Logits in training, and the buffers (batch norm's running statistics) after this batch."""
        buffers = {k: v.clone() for k, v in params.items() if k not in self.trainable}  # updated in place
        call = params | buffers
        options = {"key": key} if self.takes_key else {}
        return functional_call(self._networks.training, call, (x,), options, tie_weights=False, strict=True), buffers

    def relu_index(self, layer: str) -> int:
        """The place of a ReLU: "last", a number from 1 in the order of calls, or the name of its module."""
        modules = relu_modules(self._networks.serving, torch.zeros(2, *self.input_shape))
        if not modules:
            raise UserError(f"model {self.name} has no ReLU, whose zeros could be counted; mlp and the cnns have")
        if layer == "last":
            return len(modules) - 1
        if layer.isdigit() and 1 <= int(layer) <= len(modules):
            return int(layer) - 1
        if layer and layer in modules and not layer.isdigit():
            return modules.index(layer)
        names = ", ".join(name for name in modules if name and not name.isdigit())
        raise UserError(
            f"layer {layer!r} of model {self.name} is no ReLU; it must be last, a number from 1 to {len(modules)}"
            + (f", or one of {names}" if names else "")
        )

    @cached_property
    def has_relu(self) -> bool:
        return bool(relu_modules(self._networks.serving, torch.zeros(2, *self.input_shape)))

    def relu_output(self, params: Params, x: Tensor, relu_index: int) -> Tensor:
        """What that ReLU gives, as served."""
        with RecordReluOutputs() as watching:
            self.predict(params, x)
        return watching.outputs[relu_index]

    def features(self, params: Params, x: Tensor, max_features: int) -> Tensor:
        """What the last ReLUs give, as served, channel by channel (means over positions): [rows, channels], of as many
        layers as have at most so many channels together; of the last one in any case."""
        with RecordReluOutputs() as watching:
            self.predict(params, x)
        outputs = [h.flatten(2).mean(-1) if h.dim() > 2 else h for h in watching.outputs]
        if not outputs:
            raise UserError(f"model {self.name} has no ReLU, whose outputs could describe rows; mlp and the cnns have")
        kept = outputs[-1:]
        for h in reversed(outputs[:-1]):
            if sum(k.shape[1] for k in kept) + h.shape[1] > max_features:
                break
            kept.insert(0, h)
        return torch.cat(kept, dim=1)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the last layer's parameters: the personal part where a method splits base and head."""
        return self.layers[-1]

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of parameters, layer by layer: those of one module together, in the order in which it has them."""
        found: dict[str, list[str]] = {}
        for name in self.trainable:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return tuple(map(tuple, found.values()))

    def split_base_and_head(self, params: Params) -> tuple[Params, Params]:
        """Base and head. Buffers (batch norm's running statistics) are the base's."""
        head = set(self.head)
        return {k: v for k, v in params.items() if k not in head}, {k: v for k, v in params.items() if k in head}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._net.parameters())

    def uses(self, kind: type[nn.Module]) -> bool:
        return any(isinstance(m, kind) for m in self._net.modules())

    @property
    def batchable(self) -> bool:
        """Whether a row's output is its own affair. Batch norm mixes rows, so padding would change it."""
        return not self.uses(nn.modules.batchnorm._BatchNorm)


def network_factory(name: str) -> NetworkFactory:
    """What makes the network; refused here if there is no such thing."""
    if ":" in name:
        return import_callable("model", name)
    return look_up("model", name, NETWORKS, own_format="package.module:Class")


def load_model(name: str, input_shape: tuple[int, ...], num_classes: int, device: str = "cpu") -> Model:
    """A built-in network by name, or the user's own: `package.module:Class`.

    It is called with (input_shape, classes) if it has two parameters without a default, else with nothing.
    """
    factory = network_factory(name)
    needed = [
        p
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise UserError(
            f"model {name!r} must take (input_shape, classes) or nothing, but it needs {len(needed)} arguments"
        )
    make = partial(factory, tuple(input_shape), num_classes) if needed else factory
    return Model(name, make, tuple(input_shape), num_classes, device)


def is_stackable(model: Model) -> bool:
    """Dense layers gain from stacked clients; stacked convolutions become grouped ones, slow on a CPU."""
    return model.batchable and not model.uses(nn.modules.conv._ConvNd)
