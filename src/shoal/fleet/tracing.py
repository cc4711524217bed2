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
from shoal.fleet.flops import FlopCounts, count_flops
from shoal.types import Batch, ClientProgram, Phase, Tree

log = logging.getLogger(__name__)

FlatFunction = Callable[..., Sequence[Tensor]]  # tensors in, tensors out

DIRECT_FUNCTIONS = frozenset(  # operations whose function in torch takes the same arguments
    re.findall(
        r"\w+",
        "_log_softmax add addcmul addmm baddbmm bmm clamp div exp gather mean mm mul neg relu rsub scatter_add "
        "select sigmoid sqrt stack sub sum t tanh transpose unsqueeze where",
    )
)
IN_PLACE_METHODS = {
    torch.ops.aten.add.Tensor: "add_",
    torch.ops.aten.addcmul.default: "addcmul_",
    torch.ops.aten.mul.Tensor: "mul_",
    torch.ops.aten.relu.default: "relu_",
    torch.ops.aten.sub.Tensor: "sub_",
}
NEVER = 0
RECORD_AFTER_CALLS = 30  # calls of one kind: recording costs about as much as it saves in so many


@dataclass(frozen=True, eq=False)
class StateForm:
    """All of a state but its numbers. There is one object per form, so that comparing is free."""

    skeleton: Tree  # see tree.skeleton
    names: tuple[str, ...]  # of the leaves, in order
    shared: frozenset[str]  # leaves that the clients of a stack have in common


class State(NamedTuple):
    form: StateForm
    tensors: Sequence[Tensor]
    made_by: Replay | None = None  # which made it, and may therefore use its memory again

    def tree(self) -> Tree:
        return tree.fill_skeleton(self.form.skeleton, self.leaves())

    def leaves(self) -> dict[str, Tensor]:
        return dict(zip(self.form.names, self.tensors, strict=True))


class FlatStep:
    """A step from leaves to those leaves that it changed, found by identity: what it leaves alone is neither
    copied nor stacked. `bones`, `names` and `changed` tell what the last call did."""

    def __init__(self, step: Callable[[Tree, Batch], Tree], form: StateForm) -> None:
        self.step, self.form = step, form
        self.skeleton: Tree = {}
        self.names: tuple[str, ...] = ()
        self.changed: tuple[str, ...] = ()

    def __call__(self, tensors: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        before = dict(zip(self.form.names, tensors, strict=True))
        result = self.step(tree.fill_skeleton(self.form.skeleton, before), batch)
        after = tree.flatten(result)
        self.skeleton, self.names = tree.skeleton(result), tuple(after)
        self.changed = tuple(k for k, x in after.items() if x is not before.get(k))
        return [after[k] for k in self.changed]

    def all_leaves(self, before: dict[str, Any], outputs: Sequence[Any]) -> list[Any]:
        after = before | dict(zip(self.changed, outputs, strict=True))
        return [after[k] for k in self.names]


Lift = Callable[[FlatStep], FlatFunction]


def for_one_client(step: FlatStep) -> FlatFunction:
    """For one client; `shoal.fleet.vector` lifts a step to many."""
    return lambda *tensors: step(tensors[:-4], Batch(*tensors[-4:]))


class Recorder:
    """The forms and recordings of a fleet."""

    def __init__(self, record_after_calls: int = RECORD_AFTER_CALLS) -> None:
        self.record_after_calls = record_after_calls
        self._forms: dict[Hashable, StateForm] = {}
        self._steps: dict[Hashable, RecordedStep] = {}

    def flatten_state(self, state: Tree) -> State:
        leaves = tree.flatten(state)
        return self.make_state(tree.skeleton(state), tuple(leaves), frozenset(), list(leaves.values()))

    def make_state(
        self, skeleton: Tree, names: tuple[str, ...], shared: frozenset[str], tensors: Sequence[Tensor]
    ) -> State:
        key = (repr(skeleton), names, shared, _layout(tensors))
        return State(self._forms.setdefault(key, StateForm(skeleton, names, shared)), tensors)

    def recorded_step(self, program: ClientProgram, phase: int, lift: Lift = for_one_client) -> RecordedStep:
        """Programs are values: equal ones have equal steps. One that cannot be hashed stands for itself."""
        try:
            key: Hashable = (program, phase, lift)
            hash(key)
        except TypeError:
            key = (id(program), phase, lift)
        if key not in self._steps:
            self._steps[key] = RecordedStep(self, program, program.phases[phase], lift)
        return self._steps[key]


@dataclass(frozen=True)
class Replay:
    function: FlatFunction  # all leaves and the batch in, all leaves of the next state out
    in_place_function: (
        FlatFunction  # the same, with leaves updated where they lie: for a state that nobody else has seen
    )
    form_after: StateForm


class RecordedStep:
    """One phase's step: called as it is until it has shown to be called often, then recorded and replayed."""

    def __init__(self, recorder: Recorder, program: ClientProgram, phase: Phase, lift: Lift) -> None:
        self.recorder, self.phase, self.lift = recorder, phase, lift
        self.program = program  # kept, so that its id is not another's
        self.replays: dict[Hashable, Replay] = {}
        self._changed_leaves: set[str] = set()  # leaves that the step has been seen to change
        self._num_calls: Counter[Hashable] = Counter()
        self._flop_counts: dict[Hashable, FlopCounts] = {}

    def flop_counts(self, state: State, x: Tensor, client_state: Callable[[State], Tree] = State.tree) -> FlopCounts:
        """Of one client in this state; `one` gives it, should the state be a stack."""
        key = (state.form, x.shape[1:], x.stride(), x.dtype)
        if key not in self._flop_counts:
            self._flop_counts[key] = count_flops(self.phase, client_state(state), x)
        return self._flop_counts[key]

    def prepare(self, state: State, batch: Batch) -> State:
        """A first state in the form that later ones will have, so that the recording fits it too: a leaf that the
        step changes is no other leaf's and not shared. What it changes is tried out once, so that the first stack
        is treated as all others."""
        leaves, form = state.leaves(), state.form
        if form.shared and not self._changed_leaves:
            self._run(state, batch)
        num_uses = Counter(id(x) for x in state.tensors)
        joint_leaves = {k for k in self._changed_leaves if k in form.shared or num_uses[id(leaves.get(k))] > 1}
        if not joint_leaves:
            return state
        for k in joint_leaves:
            x = leaves[k]
            leaves[k] = x.expand(len(batch.y), *x.shape).clone() if k in form.shared else x.clone()
        return self.recorder.make_state(form.skeleton, form.names, form.shared - joint_leaves, list(leaves.values()))

    def __call__(self, state: State, batch: Batch) -> State:
        x = batch.x
        key = (state.form, x.shape, x.stride(), x.dtype, batch.y.dtype)
        replay = self.replays.get(key)
        if replay is None:
            self._num_calls[key] += 1
            return (
                self._run(state, batch)
                if self._num_calls[key] != self.recorder.record_after_calls
                else self._record(key, state, batch)
            )
        function = replay.in_place_function if state.made_by is replay else replay.function
        with torch.no_grad():
            return State(replay.form_after, function(*state.tensors, *batch), replay)

    def _run(self, state: State, batch: Batch) -> State:
        step = FlatStep(self.phase.step, state.form)
        outputs = self.lift(step)(*state.tensors, *batch)
        return self._next(step, state, step.all_leaves(state.leaves(), outputs))

    def _next(self, step: FlatStep, state: State, tensors: Sequence[Tensor]) -> State:
        self._changed_leaves.update(set(step.changed) & set(state.form.names))
        return self.recorder.make_state(step.skeleton, step.names, state.form.shared - set(step.changed), tensors)

    def _record(self, key: Hashable, state: State, batch: Batch) -> State:
        step = FlatStep(self.phase.step, state.form)
        graph = _record_graph(step, self.lift(step), [*state.tensors, *batch])
        if graph is None:
            return self._run(state, batch)
        function, consuming = _compile_graph(graph, in_place=False), _compile_graph(graph, in_place=True)
        with torch.no_grad():
            after = self._next(step, state, function(*state.tensors, *batch))
        self.replays[key] = Replay(function, consuming, after.form)
        return after


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Shapes and strides, and which tensors are one and the same: a recording takes these for granted."""
    first: dict[int, int] = {}
    return tuple((x.shape, x.stride(), x.dtype, first.setdefault(id(x), i)) for i, x in enumerate(tensors))


def _record_graph(step: FlatStep, function: FlatFunction, tensors: Sequence[Tensor]) -> Any:
    """The step as a torch.fx.GraphModule, or None if torch cannot."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and a short run does without

    try:
        with torch.random.fork_rng(devices=[]):  # recording runs the function: it must not use up chance
            module = make_fx(function)(*tensors)
    except Exception as error:  # whatever torch cannot record, plain execution does or explains
        log.debug("not recorded: %s", error)
        return None
    _simplify(module.graph)
    _return_all_leaves(module.graph, step)
    return module


def _compile_graph(module: Any, in_place: bool) -> FlatFunction:
    from torch.fx import GraphModule

    made = GraphModule(module, copy.deepcopy(module.graph))
    if all(_is_pure(node.target) for node in made.graph.nodes):
        _work_in_place(made.graph, in_place)
    for node in made.graph.nodes:
        node.target = _direct_function(node.target_accuracy)
    made.recompile()
    forward: FlatFunction = made.forward
    return forward


def _return_all_leaves(graph: Any, step: FlatStep) -> None:
    """The whole next state: what the step did not change comes out as it went in."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    before = dict(zip(step.form.names, inputs, strict=False))  # the batch comes after the leaves
    output.args = (step.all_leaves(before, output.args[0]),)


def _simplify(graph: Any) -> None:
    """The same values from fewer calls: without views that change nothing, transposes that undo each other,
    factors of one and second computations of the same, unless something is changed in place."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    pure = all(_is_pure(node.target) for node in calls)
    seen: dict[Hashable, Any] = {}
    for node in calls:
        same = _unchanged_source(node) or (pure and (_unscaled_source(node) or _earlier_equal(node, seen)))
        if same:
            node.replace_all_uses_with(same)
    graph.eliminate_dead_code()


def _work_in_place(graph: Any, in_place: bool) -> None:
    """Elementwise operations write over their first operand if nothing needs it afterwards. That may be a leaf
    (when consuming), if the result is the same leaf's next value: then the state's maker owns its memory."""
    index_of_node = {node: i for i, node in enumerate(graph.nodes)}
    inputs = [node for node in index_of_node if node.op == "placeholder"]
    outputs = next(node for node in index_of_node if node.op == "output").args[0]

    def last_use(node: Any) -> int:
        return max(
            (index_of_node[u] if not _is_view(u) else max(index_of_node[u], last_use(u)) for u in node.users),
            default=-1,
        )

    for node in [n for n in index_of_node if n.target in IN_PLACE_METHODS]:
        operand = node.args[0]
        if _recorded_layout(operand) != _recorded_layout(node) or last_use(operand) != index_of_node[node]:
            continue
        if operand in node.args[1:] or any(
            _root(n) is _root(operand) for n in node.all_input_nodes if n is not operand
        ):
            continue  # it would read what it is writing over
        leaf = operand.op == "placeholder"
        is_own_leaf = leaf and in_place and node in outputs and _is_same_leaf(inputs, outputs, operand, node)
        if is_own_leaf or (operand.op == "call_function" and _is_fresh(operand)):
            node.op, node.target = "call_method", IN_PLACE_METHODS[node.target_accuracy]


def _is_same_leaf(inputs: Sequence[Any], outputs: Sequence[Any], before: Any, after: Any) -> bool:
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


def _is_pure(target: Any) -> bool:
    return not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


def _unchanged_source(node: Any) -> Any:
    """The node that this one is a view of, with nothing changed."""
    aten = torch.ops.aten
    if node.target in (aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.permute.default):
        return node.args[0] if _recorded_layout(node) == _recorded_layout(node.args[0]) else None
    if node.target in (aten.t.default, aten.transpose.int):
        inner = node.args[0]
        return inner.args[0] if (inner.target, inner.args[1:]) == (node.target_accuracy, node.args[1:]) else None
    return None


def _unscaled_source(node: Any) -> Any:
    x = node.args[0] if node.args else None
    return (
        x
        if node.target == torch.ops.aten.mul.Scalar
        and node.args[1] == 1
        and _recorded_layout(x) == _recorded_layout(node)
        else None
    )


def _earlier_equal(node: Any, seen: dict[Hashable, Any]) -> Any:
    """An earlier node with the same operation on the same values; what is drawn by chance is never the same."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded in node.target_accuracy.tags
    ):
        return None
    first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
    return None if first is node else first


def _direct_function(target: Any) -> Any:
    """torch.add for torch.ops.aten.add.Tensor: the same kernel, found in half the time."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    name = target._schema.name.removeprefix("aten::")
    return getattr(torch, name) if name in DIRECT_FUNCTIONS else target


def _recorded_layout(node: Any) -> Any:
    """Shape, strides and type as they were at recording; None is like nothing, not even itself."""
    value = getattr(node, "meta", {}).get("val")
    return object() if not isinstance(value, Tensor) else (tuple(value.shape), value.stride(), value.dtype)
