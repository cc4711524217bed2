"""A network as pure functions: `init(seed)`, `predict(params, x)` and `forward(params, x, key)`.

`load_model` returns a built-in network or one of the user.
"""

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
from shoal.models.cnn import Cnn1d, CnnCifar, CnnFedAvg
from shoal.models.mlp import Linear, Mlp
from shoal.models.relu_outputs import RecordReluOutputs, relu_modules
from shoal.models.resnet import ResNet18
from shoal.types import Params

NetworkFactory = Callable[..., nn.Module]

NETWORKS: dict[str, NetworkFactory] = {
    "mlp": Mlp,
    "mlp-dropout": partial(Mlp, dropout=0.5),
    "linear": Linear,
    "cnn-cifar": CnnCifar,
    "cnn-fedavg": CnnFedAvg,
    "cnn-1d": Cnn1d,
    "resnet18": ResNet18,
    "resnet18-batchnorm": partial(ResNet18, norm="batch"),
}


def model_names() -> tuple[str, ...]:
    """Returns the names of the built-in networks."""
    return tuple(NETWORKS)


class _PerThreadNetworks(threading.local):
    """Copies of a network for each thread and mode.

    A call with other weights puts them into the module while it runs, and the mode is a flag of the module. Threads
    that shared a module would therefore see each other's weights.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    @cached_property
    def training(self) -> nn.Module:
        return copy.deepcopy(self._net).train()

    @cached_property
    def serving(self) -> nn.Module:
        return copy.deepcopy(self._net).eval()


class Model:
    """A network for inputs of one shape. Its functions take the weights as an argument.

    Parameters
    ----------
    name
        The name of the network in error messages.
    factory
        Creates the network.
    input_shape
        The shape of one input.
    num_classes
        The number of classes, which is the number of outputs.
    device
        The device of the initial weights, such as "cuda".

    Raises
    ------
    UserError
        If the network cannot be created, does not take the inputs, or cannot be federated.
    """

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
        self._net = self._check_network(self._build_network(0))  # a template for copies, never called
        self._networks = _PerThreadNetworks(self._net)
        self.trainable = tuple(k for k, p in self._net.named_parameters() if p.requires_grad)
        self.takes_key = "key" in inspect.signature(self._net.forward).parameters
        self._check_output()

    def _build_network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # layers draw their initial weights from the global generator
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
                f"model {self.name} gives outputs of shape {shape} for 2 samples; it must be (2, {self.num_classes})"
            )

    def init(self, seed: int) -> Params:
        """Returns initial weights, sorted by name as in stored and received models."""
        state = self._build_network(seed).state_dict()
        return {k: state[k].detach().clone().to(self.device) for k in sorted(state)}

    def predict(self, params: Params, x: Tensor) -> Tensor:
        """Returns logits in evaluation mode: without dropout, and with the running statistics of batch norm."""
        return functional_call(self._networks.serving, params, (x,), tie_weights=False, strict=True)

    def forward(self, params: Params, x: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        """Returns logits in training mode, and the buffers after this batch.

        Parameters
        ----------
        params
            Parameters and buffers.
        x
            The inputs of the batch.
        key
            The source of randomness, for networks whose `forward` takes a key.
        """
        buffers = {k: v.clone() for k, v in params.items() if k not in self.trainable}  # the call updates them in place
        keywords = {"key": key} if self.takes_key else {}
        net, weights = self._networks.training, params | buffers
        return functional_call(net, weights, (x,), keywords, tie_weights=False, strict=True), buffers

    def relu_index(self, layer: str) -> int:
        """Returns the index of a ReLU in the order of calls.

        Parameters
        ----------
        layer
            "last", a number from 1 in the order of calls, or the name of the ReLU's module.

        Raises
        ------
        UserError
            If the network has no such ReLU.
        """
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
        """Whether the network has a ReLU."""
        return bool(relu_modules(self._networks.serving, torch.zeros(2, *self.input_shape)))

    def relu_output(self, params: Params, x: Tensor, relu_index: int) -> Tensor:
        """Returns the output of the ReLU with this index, in evaluation mode."""
        with RecordReluOutputs() as recorder:
            self.predict(params, x)
        return recorder.outputs[relu_index]

    def features(self, params: Params, x: Tensor, max_features: int) -> Tensor:
        """Returns the outputs of the last ReLUs as features, in evaluation mode.

        Parameters
        ----------
        params
            Parameters and buffers.
        x
            The inputs.
        max_features
            The largest number of features. The last ReLU is used in any case, and earlier ones while they fit.

        Returns
        -------
        torch.Tensor
            The features, as [samples, channels]. The outputs of convolutions are averaged over positions.
        """
        with RecordReluOutputs() as recorder:
            self.predict(params, x)
        outputs = [h.flatten(2).mean(-1) if h.dim() > 2 else h for h in recorder.outputs]
        if not outputs:
            raise UserError(
                f"model {self.name} has no ReLU, whose outputs could describe samples; mlp and the cnns have"
            )
        features = outputs[-1:]
        for h in reversed(outputs[:-1]):
            if sum(f.shape[1] for f in features) + h.shape[1] > max_features:
                break
            features.insert(0, h)
        return torch.cat(features, dim=1)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the parameters of the last layer, which is the head if a method splits base and head."""
        return self.layers[-1]

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """Names of the trainable parameters of each layer, which is a module, in the order of the network."""
        names_by_module: dict[str, list[str]] = {}
        for name in self.trainable:
            names_by_module.setdefault(name.rpartition(".")[0], []).append(name)
        return tuple(map(tuple, names_by_module.values()))

    def split_base_and_head(self, params: Params) -> tuple[Params, Params]:
        """Returns base and head. Buffers, such as the running statistics of batch norm, belong to the base."""
        head = set(self.head)
        return {k: v for k, v in params.items() if k not in head}, {k: v for k, v in params.items() if k in head}

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self._net.parameters())

    def uses(self, kind: type[nn.Module]) -> bool:
        """Returns whether the network has a module of this class."""
        return any(isinstance(m, kind) for m in self._net.modules())

    @property
    def batchable(self) -> bool:
        """Whether an output depends on its own sample only. Batch norm mixes samples, so padding changes outputs."""
        return not self.uses(nn.modules.batchnorm._BatchNorm)


def network_factory(name: str) -> NetworkFactory:
    """Returns the class or function that creates a network.

    Raises
    ------
    UserError
        If there is no such network.
    """
    if ":" in name:
        return import_callable("model", name)
    return look_up("model", name, NETWORKS, own_format="package.module:Class")


def load_model(name: str, input_shape: tuple[int, ...], num_classes: int, device: str = "cpu") -> Model:
    """Returns a model by name.

    Parameters
    ----------
    name
        A built-in network such as "mlp", or a class or function of the user as `package.module:Class`. It is called
        with `(input_shape, num_classes)` if it has two parameters without a default, otherwise without arguments.
    input_shape
        The shape of one input.
    num_classes
        The number of classes.
    device
        The device of the initial weights, such as "cuda".

    Returns
    -------
    Model
        The network as pure functions.

    Raises
    ------
    UserError
        If there is no such network, or if it cannot be federated.
    """
    factory = network_factory(name)
    required = [
        p
        for p in inspect.signature(factory).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) not in (0, 2):
        raise UserError(
            f"model {name!r} must take (input_shape, num_classes) or nothing, but it needs {len(required)} arguments"
        )
    bound_factory = partial(factory, tuple(input_shape), num_classes) if required else factory
    return Model(name, bound_factory, tuple(input_shape), num_classes, device)


def is_stackable(model: Model) -> bool:
    """Returns whether stacking clients is fast: stacked convolutions become grouped ones, which are slow on a CPU."""
    return model.batchable and not model.uses(nn.modules.conv._ConvNd)
