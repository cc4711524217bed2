"""Records the outputs of the ReLUs of a network, whether they are modules or function calls in `forward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

RELU_FUNCTIONS = {torch.relu, torch.relu_, F.relu, F.relu_, Tensor.relu, Tensor.relu_}


class RecordReluOutputs(TorchFunctionMode):
    """Records the output of every ReLU that is called inside the context, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self._is_inside_relu = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in RELU_FUNCTIONS or self._is_inside_relu:  # F.relu calls torch.relu, which counts once
            return func(*args, **(kwargs or {}))
        self._is_inside_relu = True
        try:
            output = func(*args, **(kwargs or {}))
        finally:
            self._is_inside_relu = False
        self.outputs.append(output.clone())  # the next operation may work in place
        return output


def relu_modules(net: nn.Module, x: Tensor) -> list[str]:
    """Returns the module names of the ReLUs in the order of calls. A ReLU that is a function has an empty name."""
    recorder, names = RecordReluOutputs(), dict[int, str]()

    def record_name(name: str) -> Callable[..., None]:
        return lambda *_: names.update({len(recorder.outputs) - 1: name})

    hooks = [m.register_forward_hook(record_name(k)) for k, m in net.named_modules() if isinstance(m, nn.ReLU)]
    try:
        with torch.no_grad(), recorder:
            net(x)
    finally:
        for hook in hooks:
            hook.remove()
    return [names.get(i, "") for i in range(len(recorder.outputs))]
