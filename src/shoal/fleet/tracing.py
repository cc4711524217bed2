"""A step recorded once as a flat list of tensor operations, and replayed from then on.

A pure step of small tensors spends most of its time in the machinery around the arithmetic (torch.func's
transforms, Python). Recording (torch.fx) runs the step with that machinery once; the replay calls the same
kernels in the same order on other data, so it gives the same bits, several times faster. What cannot be
recorded (control flow that depends on data) is simply run as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

log = logging.getLogger(__name__)

Flat = Callable[..., Sequence[Tensor]]  # tensors in, tensors out

RECORD_AFTER = 60  # calls of one kind: recording costs about as much as it saves in so many
NO_OPS = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default}


class Recorder:
    """Calls a function as it is until it has shown to be called often, then records and replays it."""

    def __init__(self, after: int = RECORD_AFTER) -> None:
        self.after = after
        self._seen: Counter[Hashable] = Counter()
        self._replays: dict[Hashable, Flat] = {}

    def __call__(self, kind: Hashable, function: Flat, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """`kind` names the function; calls of one kind differ only in their tensors."""
        key = (kind, tuple((x.shape, x.stride(), x.dtype) for x in tensors))
        replay = self._replays.get(key)
        if replay is None:
            self._seen[key] += 1
            if self._seen[key] != self.after:
                return function(*tensors)
            replay = self._replays[key] = _record(function, tensors)
        with torch.no_grad():
            return replay(*tensors)


def _record(function: Flat, tensors: Sequence[Tensor]) -> Flat:
    try:
        with torch.random.fork_rng(devices=[]):  # recording runs the function: it must not use up chance
            recorded = make_fx(function)(*tensors)
    except Exception as error:  # whatever torch cannot record, plain execution does or explains
        log.debug("not recorded: %s", error)
        return function
    _simplify(recorded.graph)
    recorded.recompile()
    return recorded


def _simplify(graph: fx.Graph) -> None:
    """Without what is never used, and without views that do not change the shape."""
    for node in graph.nodes:
        if node.target in NO_OPS and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _shape(node: Any) -> Any:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return None if value is None else (tuple(value.shape), tuple(value.stride()) if hasattr(value, "stride") else None)
