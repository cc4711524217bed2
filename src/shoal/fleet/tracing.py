"""A step recorded once as a flat list of tensor operations, and replayed from then on.

A pure step of small tensors spends most of its time in the machinery around the arithmetic (torch.func's
transforms, Python). Recording (torch.fx) runs the step with that machinery once; the replay calls the same
kernels in the same order on other data, so it gives the same bits, several times faster. What cannot be
recorded (control flow that depends on data) is simply run as it is.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import tree
from shoal.fleet.flops import Work, work_of
from shoal.types import Batch, ClientProgram, Phase, Tree

log = logging.getLogger(__name__)

Flat = Callable[..., Sequence[Tensor]]  # tensors in, tensors out

DIRECT = frozenset(  # operations whose function in torch takes the same arguments
    re.findall(
        r"\w+",
        "_log_softmax add addcmul addmm baddbmm bmm clamp div exp gather mean mm mul neg relu rsub scatter_add "
        "select sigmoid sqrt stack sub sum t tanh transpose unsqueeze where",
    )
)
IN_PLACE = {
    torch.ops.aten.add.Tensor: "add_",
    torch.ops.aten.addcmul.default: "addcmul_",
    torch.ops.aten.mul.Tensor: "mul_",
    torch.ops.aten.relu.default: "relu_",
    torch.ops.aten.sub.Tensor: "sub_",
}
NEVER = 0
RECORD_AFTER = 30  # calls of one kind: recording costs about as much as it saves in so many


@dataclass(frozen=True, eq=False)
class Form:
    """All of a state but its numbers. There is one object per form, so that comparing is free."""

    bones: Tree  # see tree.skeleton
    names: tuple[str, ...]  # of the leaves, in order
    shared: frozenset[str]  # leaves that the clients of a stack have in common


class State(NamedTuple):
    form: Form
    tensors: Sequence[Tensor]
    by: Replay | None = None  # which made it, and may therefore use its memory again

    def tree(self) -> Tree:
        return tree.filled(self.form.bones, self.leaves())

    def leaves(self) -> dict[str, Tensor]:
        return dict(zip(self.form.names, self.tensors, strict=True))


class FlatStep:
    """A step from leaves to those leaves that it changed, found by identity: what it leaves alone is neither
    copied nor stacked. `bones`, `names` and `changed` tell what the last call did."""

    def __init__(self, step: Callable[[Tree, Batch], Tree], form: Form) -> None:
        self.step, self.form = step, form
        self.bones: Tree = {}
        self.names: tuple[str, ...] = ()
        self.changed: tuple[str, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        before = dict(zip(self.form.names, tensors, strict=True))
        result = self.step(tree.filled(self.form.bones, before), batch)
        after = tree.flatten(result)
        self.bones, self.names = tree.skeleton(result), tuple(after)
        self.changed = tuple(k for k, x in after.items() if x is not before.get(k))
        return [after[k] for k in self.changed]

    def merged(self, before: dict[str, Any], outputs: Sequence[Any]) -> list[Any]:
        after = before | dict(zip(self.changed, outputs, strict=True))
        return [after[k] for k in self.names]


Lift = Callable[[FlatStep], Flat]


def alone(step: FlatStep) -> Flat:
    """For one client; `shoal.fleet.vector` lifts a step to many."""
    return lambda *tensors: step(tensors[:-4], Batch(*tensors[-4:]))


class Recorder:
    """The forms and recordings of a fleet."""

    def __init__(self, after: int = RECORD_AFTER) -> None:
        self.after = after
        self._forms: dict[Hashable, Form] = {}
        self._steps: dict[Hashable, Steps] = {}

    def state(self, s: Tree) -> State:
        leaves = tree.flatten(s)
        return self.formed(tree.skeleton(s), tuple(leaves), frozenset(), list(leaves.values()))

    def formed(self, bones: Tree, names: tuple[str, ...], shared: frozenset[str], tensors: Sequence[Tensor]) -> State:
        key = (repr(bones), names, shared, _layout(tensors))
        return State(self._forms.setdefault(key, Form(bones, names, shared)), tensors)

    def steps(self, program: ClientProgram, phase: int, lift: Lift = alone) -> Steps:
        """Programs are values: equal ones have equal steps. One that cannot be hashed stands for itself."""
        try:
            key: Hashable = (program, phase, lift)
            hash(key)
        except TypeError:
            key = (id(program), phase, lift)
        if key not in self._steps:
            self._steps[key] = Steps(self, program, program.phases[phase], lift)
        return self._steps[key]


@dataclass(frozen=True)
class Replay:
    function: Flat  # all leaves and the batch in, all leaves of the next state out
    consuming: Flat  # the same, with leaves updated where they lie: for a state that nobody else has seen
    after: Form


class Steps:
    """One phase's step: called as it is until it has shown to be called often, then recorded and replayed."""

    def __init__(self, recorder: Recorder, program: ClientProgram, phase: Phase, lift: Lift) -> None:
        self.recorder, self.phase, self.lift = recorder, phase, lift
        self.program = program  # kept, so that its id is not another's
        self.replays: dict[Hashable, Replay] = {}
        self._changes: set[str] = set()  # leaves that the step has been seen to change
        self._seen: Counter[Hashable] = Counter()
        self._work: dict[Hashable, Work] = {}

    def work(self, state: State, x: Tensor, one: Callable[[State], Tree] = State.tree) -> Work:
        """Of one client in this state; `one` gives it, should the state be a stack."""
        key = (state.form, x.shape[1:], x.stride(), x.dtype)
        if key not in self._work:
            self._work[key] = work_of(self.phase, one(state), x)
        return self._work[key]

    def ready(self, state: State, batch: Batch) -> State:
        """A first state in the form that later ones will have, so that the recording fits it too: a leaf that the
        step changes is no other leaf's and not shared. What it changes is tried out once, so that the first stack
        is treated as all others."""
        leaves, form = state.leaves(), state.form
        if form.shared and not self._changes:
            self._run(state, batch)
        often = Counter(id(x) for x in state.tensors)
        joint = {k for k in self._changes if k in form.shared or often[id(leaves.get(k))] > 1}
        if not joint:
            return state
        for k in joint:
            x = leaves[k]
            leaves[k] = x.expand(len(batch.y), *x.shape).clone() if k in form.shared else x.clone()
        return self.recorder.formed(form.bones, form.names, form.shared - joint, list(leaves.values()))

    def __call__(self, state: State, batch: Batch) -> State:
        x = batch.x
        key = (state.form, x.shape, x.stride(), x.dtype, batch.y.dtype)
        replay = self.replays.get(key)
        if replay is None:
            self._seen[key] += 1
            return (
                self._run(state, batch) if self._seen[key] != self.recorder.after else self._record(key, state, batch)
            )
        function = replay.consuming if state.by is replay else replay.function
        with torch.no_grad():
            return State(replay.after, function(*state.tensors, *batch), replay)

    def _run(self, state: State, batch: Batch) -> State:
        step = FlatStep(self.phase.step, state.form)
        outputs = self.lift(step)(*state.tensors, *batch)
        return self._next(step, state, step.merged(state.leaves(), outputs))

    def _next(self, step: FlatStep, state: State, tensors: Sequence[Tensor]) -> State:
        self._changes.update(set(step.changed) & set(state.form.names))
        return self.recorder.formed(step.bones, step.names, state.form.shared - set(step.changed), tensors)

    def _record(self, key: Hashable, state: State, batch: Batch) -> State:
        step = FlatStep(self.phase.step, state.form)
        graph = _recorded(step, self.lift(step), [*state.tensors, *batch])
        if graph is None:
            return self._run(state, batch)
        function, consuming = _compiled(graph, consuming=False), _compiled(graph, consuming=True)
        with torch.no_grad():
            after = self._next(step, state, function(*state.tensors, *batch))
        self.replays[key] = Replay(function, consuming, after.form)
        return after


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Shapes and strides, and which tensors are one and the same: a recording takes these for granted."""
    first: dict[int, int] = {}
    return tuple((x.shape, x.stride(), x.dtype, first.setdefault(id(x), i)) for i, x in enumerate(tensors))


def _recorded(step: FlatStep, function: Flat, tensors: Sequence[Tensor]) -> Any:
    """The step as a torch.fx.GraphModule, or None if torch cannot."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and a short run does without

    try:
        with torch.random.fork_rng(devices=[]):  # recording runs the function: it must not use up chance
            module = make_fx(function)(*tensors)
    except Exception as error:  # whatever torch cannot record, plain execution does or explains
        log.debug("not recorded: %s", error)
        return None
    _simplify(module.graph)
    _return_all(module.graph, step)
    return module


def _compiled(module: Any, consuming: bool) -> Flat:
    from torch.fx import GraphModule

    made = GraphModule(module, copy.deepcopy(module.graph))
    if all(_pure(node.target) for node in made.graph.nodes):
        _work_in_place(made.graph, consuming)
    for node in made.graph.nodes:
        node.target = _direct(node.target)
    made.recompile()
    forward: Flat = made.forward
    return forward


def _return_all(graph: Any, step: FlatStep) -> None:
    """The whole next state: what the step did not change comes out as it went in."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    before = dict(zip(step.form.names, inputs, strict=False))  # the batch comes after the leaves
    output.args = (step.merged(before, output.args[0]),)


def _simplify(graph: Any) -> None:
    """The same values from fewer calls: without views that change nothing, transposes that undo each other,
    factors of one and second computations of the same, unless something is changed in place."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    pure = all(_pure(node.target) for node in calls)
    seen: dict[Hashable, Any] = {}
    for node in calls:
        same = _undone(node) or (pure and (_times_one(node) or _computed(node, seen)))
        if same:
            node.replace_all_uses_with(same)
    graph.eliminate_dead_code()


def _work_in_place(graph: Any, consuming: bool) -> None:
    """Elementwise operations write over their first operand if nothing needs it afterwards. That may be a leaf
    (when consuming), if the result is the same leaf's next value: then the state's maker owns its memory."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in place if node.op == "placeholder"]
    outputs = next(node for node in place if node.op == "output").args[0]

    def last_use(node: Any) -> int:
        return max((place[u] if not _is_view(u) else max(place[u], last_use(u)) for u in node.users), default=-1)

    for node in [n for n in place if n.target in IN_PLACE]:
        operand = node.args[0]
        if _look(operand) != _look(node) or last_use(operand) != place[node]:
            continue
        if operand in node.args[1:] or any(
            _root(n) is _root(operand) for n in node.all_input_nodes if n is not operand
        ):
            continue  # it would read what it is writing over
        leaf = operand.op == "placeholder"
        own = leaf and consuming and node in outputs and _same_leaf(inputs, outputs, operand, node)
        if own or (operand.op == "call_function" and _is_fresh(operand)):
            node.op, node.target = "call_method", IN_PLACE[node.target]


def _same_leaf(inputs: Sequence[Any], outputs: Sequence[Any], before: Any, after: Any) -> bool:
    """And no other leaf is a view of it."""
    return [_root(node) for node in outputs].count(after) == 1 and outputs.index(after) == inputs.index(before)


def _root(node: Any) -> Any:
    """What a view is a view of, in the end."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _is_fresh(node: Any) -> bool:
    """In memory of its own: neither a view nor one of several results."""
    return isinstance(node.target, torch._ops.OpOverload) and not _is_view(node)


def _pure(target: Any) -> bool:
    return not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


def _undone(node: Any) -> Any:
    """The node that this one is a view of, with nothing changed."""
    aten = torch.ops.aten
    if node.target in (aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.permute.default):
        return node.args[0] if _look(node) == _look(node.args[0]) else None
    if node.target in (aten.t.default, aten.transpose.int):
        inner = node.args[0]
        return inner.args[0] if (inner.target, inner.args[1:]) == (node.target, node.args[1:]) else None
    return None


def _times_one(node: Any) -> Any:
    x = node.args[0] if node.args else None
    return x if node.target == torch.ops.aten.mul.Scalar and node.args[1] == 1 and _look(x) == _look(node) else None


def _computed(node: Any, seen: dict[Hashable, Any]) -> Any:
    """An earlier node with the same operation on the same values; what is drawn by chance is never the same."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
    return None if first is node else first


def _direct(target: Any) -> Any:
    """torch.add for torch.ops.aten.add.Tensor: the same kernel, found in half the time."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    name = target._schema.name.removeprefix("aten::")
    return getattr(torch, name) if name in DIRECT else target


def _look(node: Any) -> Any:
    """Shape, strides and type as they were at recording; None is like nothing, not even itself."""
    value = getattr(node, "meta", {}).get("val")
    return object() if not isinstance(value, Tensor) else (tuple(value.shape), value.stride(), value.dtype)
