"""A step recorded once as a flat list of tensor operations, and replayed from then on.

A pure step of small tensors spends most of its time in the machinery around the arithmetic (torch.func's
transforms, Python). Recording (torch.fx) runs the step with that machinery once; the replay calls the same
kernels in the same order on other data, so it gives the same bits, several times faster. What cannot be
recorded (control flow that depends on data) is simply run as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shoal import tree
from shoal.types import Batch, ClientProgram, Tree

log = logging.getLogger(__name__)

Flat = Callable[..., Sequence[Tensor]]  # tensors in, tensors out

RECORD_AFTER = 60  # calls of one kind: recording costs about as much as it saves in so many
NO_OPS = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default}


@dataclass(frozen=True)
class Leaves:
    """How a step's outputs become the next state: which leaves it has, and which of them are new.

    What a step leaves alone is found by identity, so it is neither copied nor stacked.
    """

    bones: Tree  # see tree.skeleton
    kept: tuple[str, ...]
    changed: tuple[str, ...]

    def merged(self, before: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        new = dict(zip(self.changed, outputs, strict=True))
        return {k: new[k] if k in new else before[k] for k in self.kept}


class FlatStep:
    """A phase's step from leaves to changed leaves. `leaves` tells what its last call did."""

    def __init__(self, step: Callable[[Tree, Batch], Tree], bones: Tree, names: Sequence[str]) -> None:
        self.step, self.bones, self.names = step, bones, names
        self.leaves = Leaves({}, (), ())

    def __call__(self, tensors: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        before = dict(zip(self.names, tensors, strict=True))
        result = self.step(tree.filled(self.bones, before), batch)
        after = tree.flatten(result)
        changed = tuple(k for k, x in after.items() if x is not before.get(k))
        self.leaves = Leaves(tree.skeleton(result), tuple(after), changed)
        return [after[k] for k in self.leaves.changed]


class Recorder:
    """Calls a function as it is until it has shown to be called often, then records and replays it."""

    def __init__(self, after: int = RECORD_AFTER) -> None:
        self.after = after
        self._seen: Counter[Hashable] = Counter()
        self._replays: dict[Hashable, tuple[Flat, Leaves]] = {}

    def __call__(
        self, kind: Hashable, function: Flat, tensors: Sequence[Tensor], flat: FlatStep
    ) -> tuple[Sequence[Tensor], Leaves]:
        """What `function` gives, which calls `flat` inside. Calls of one kind differ only in their tensors."""
        key = (kind, repr(flat.bones), _form(tensors))
        found = self._replays.get(key)
        if found is None:
            self._seen[key] += 1
            replay = _record(function, tensors) if self._seen[key] == self.after else None
            if replay is None:
                return function(*tensors), flat.leaves
            found = self._replays[key] = (replay, flat.leaves)
        replay, leaves = found
        with torch.no_grad():
            return replay(*tensors), leaves


def _form(tensors: Sequence[Tensor]) -> Hashable:
    """Layout, and which tensors are one and the same: a recording takes these for granted."""
    first: dict[int, int] = {}
    return tuple((x.shape, x.stride(), x.dtype, first.setdefault(id(x), i)) for i, x in enumerate(tensors))


def kind_of(program: ClientProgram, phase: int) -> Hashable:
    """Programs are values: equal ones have equal steps. One that cannot be hashed stands for itself."""
    try:
        hash(program)
    except TypeError:
        return (id(program), phase)
    return (program, phase)


def _record(function: Flat, tensors: Sequence[Tensor]) -> Flat | None:
    try:
        with torch.random.fork_rng(devices=[]):  # recording runs the function: it must not use up chance
            recorded = make_fx(function)(*tensors)
    except Exception as error:  # whatever torch cannot record, plain execution does or explains
        log.debug("not recorded: %s", error)
        return None
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
