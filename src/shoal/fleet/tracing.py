"""Records a step once as a flat list of tensor operations, and replays it from then on.

A pure step on small tensors spends most of its time outside the arithmetic, in Python and in the transforms of
torch.func. Recording (torch.fx) runs the step once in this way. The replay calls the same kernels in the same order on
other data. It gives the same bits and is several times faster. A step that cannot be recorded, because its control
flow depends on data, runs as it is.
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
RECORD_AFTER_CALLS = 30  # calls with the same shapes; recording costs about as much as 30 replays save


@dataclass(frozen=True, eq=False)
class StateForm:
    """The structure of a state without its values.

    There is one object per structure, so comparing two structures compares identities.
    """

    skeleton: Tree  # see tree.skeleton
    names: tuple[str, ...]  # paths of the leaves, in order
    shared: frozenset[str]  # leaves that all clients of a stack share


class State(NamedTuple):
    """A state as a flat list of leaves, of one client or of a stack of clients."""

    form: StateForm
    tensors: Sequence[Tensor]
    made_by: Replay | None = None  # the replay that made the state and may reuse its memory

    def tree(self) -> Tree:
        """Returns the state as a tree."""
        return tree.fill_skeleton(self.form.skeleton, self.leaves())

    def leaves(self) -> dict[str, Tensor]:
        """Returns the leaves by path."""
        return dict(zip(self.form.names, self.tensors, strict=True))


class FlatStep:
    """A step as a function from all leaves to the leaves that it changed.

    Changed leaves are found by identity. Leaves that the step does not change are neither copied nor stacked. After a
    call, `skeleton` and `names` describe its result, and `changed` lists the paths of the changed leaves.
    """

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
        """Returns all leaves of the next state, from the leaves before and the changed leaves."""
        after = before | dict(zip(self.changed, outputs, strict=True))
        return [after[k] for k in self.names]


Lift = Callable[[FlatStep], FlatFunction]


def for_one_client(step: FlatStep) -> FlatFunction:
    """Returns the step as a function of leaves for one client. `shoal.fleet.vector` lifts a step to many clients."""
    return lambda *tensors: step(tensors[:-4], Batch(*tensors[-4:]))


class Recorder:
    """The state forms and the recorded steps of a fleet."""

    def __init__(self, record_after_calls: int = RECORD_AFTER_CALLS) -> None:
        self.record_after_calls = record_after_calls
        self._forms: dict[Hashable, StateForm] = {}
        self._steps: dict[Hashable, RecordedStep] = {}

    def flatten_state(self, state: Tree) -> State:
        """Returns the state of one client as a flat list of leaves."""
        leaves = tree.flatten(state)
        return self.make_state(tree.skeleton(state), tuple(leaves), frozenset(), list(leaves.values()))

    def make_state(
        self, skeleton: Tree, names: tuple[str, ...], shared: frozenset[str], tensors: Sequence[Tensor]
    ) -> State:
        """Returns a state with one form object for all states of this structure and memory layout."""
        key = (repr(skeleton), names, shared, _layout(tensors))
        return State(self._forms.setdefault(key, StateForm(skeleton, names, shared)), tensors)

    def recorded_step(self, program: ClientProgram, phase: int, lift: Lift = for_one_client) -> RecordedStep:
        """Returns the recorded step of a phase.

        Equal programs have equal steps, because programs are values. A program without a hash equals only itself.
        """
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
    """The recording of a step for one form of states and batches."""

    function: FlatFunction  # from all leaves and the batch to all leaves of the next state
    in_place_function: FlatFunction  # the same, but it updates leaves in place; for states that only the replay uses
    form_after: StateForm


class RecordedStep:
    """The step of a phase. It runs as it is until it has been called often, and is then recorded and replayed."""

    def __init__(self, recorder: Recorder, program: ClientProgram, phase: Phase, lift: Lift) -> None:
        self.recorder, self.phase, self.lift = recorder, phase, lift
        self.program = program  # a reference to it keeps its id from being used again
        self.replays: dict[Hashable, Replay] = {}
        self._changed_leaves: set[str] = set()  # leaves that a call has changed so far
        self._num_calls: Counter[Hashable] = Counter()
        self._flop_counts: dict[Hashable, FlopCounts] = {}

    def flop_counts(self, state: State, x: Tensor, client_state: Callable[[State], Tree] = State.tree) -> FlopCounts:
        """Returns the operations of one client.

        Parameters
        ----------
        state
            The state of the client, or a stack of states.
        x
            Inputs of the client.
        client_state
            Returns the state of one client. For a stack, it is one of the stacked clients.
        """
        key = (state.form, x.shape[1:], x.stride(), x.dtype)
        if key not in self._flop_counts:
            self._flop_counts[key] = count_flops(self.phase, client_state(state), x)
        return self._flop_counts[key]

    def prepare(self, state: State, batch: Batch) -> State:
        """Returns a first state in the form that later states will have, so that the recording fits it too.

        A leaf that the step changes must not be shared and must not be another leaf as well. The step runs once to find
        the leaves that it changes, so that the first stack is treated as all others.
        """
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
            if self._num_calls[key] == self.recorder.record_after_calls:
                return self._record(key, state, batch)
            return self._run(state, batch)
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
        function, in_place_function = _compile_graph(graph, in_place=False), _compile_graph(graph, in_place=True)
        with torch.no_grad():
            after = self._next(step, state, function(*state.tensors, *batch))
        self.replays[key] = Replay(function, in_place_function, after.form)
        return after


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Returns shapes, strides and types, and which tensors are identical. A recording is valid for one layout."""
    first: dict[int, int] = {}
    return tuple((x.shape, x.stride(), x.dtype, first.setdefault(id(x), i)) for i, x in enumerate(tensors))


def _record_graph(step: FlatStep, function: FlatFunction, tensors: Sequence[Tensor]) -> Any:
    """Returns the step as a torch.fx.GraphModule, or None if torch cannot record it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and short runs do not need it

    try:
        with torch.random.fork_rng(devices=[]):  # recording runs the function, which may draw numbers
            module = make_fx(function)(*tensors)
    except Exception as error:  # plain execution runs what torch cannot record, or explains the error
        log.debug("A step is not recorded: %s", error)
        return None
    _simplify(module.graph)
    _return_all_leaves(module.graph, step)
    return module


def _compile_graph(module: Any, in_place: bool) -> FlatFunction:
    """Returns the recorded graph as a function."""
    from torch.fx import GraphModule

    compiled = GraphModule(module, copy.deepcopy(module.graph))
    if all(_is_pure(node.target) for node in compiled.graph.nodes):
        _work_in_place(compiled.graph, in_place)
    for node in compiled.graph.nodes:
        node.target = _direct_function(node.target)
    compiled.recompile()
    forward: FlatFunction = compiled.forward
    return forward


def _return_all_leaves(graph: Any, step: FlatStep) -> None:
    """Makes the graph return all leaves of the next state. Leaves that the step does not change pass through."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    before = dict(zip(step.form.names, inputs, strict=False))  # the inputs of the batch follow the leaves
    output.args = (step.all_leaves(before, output.args[0]),)


def _simplify(graph: Any) -> None:
    """Makes the graph compute the same values with fewer calls.

    Views that change nothing and transposes that undo each other are removed. If no operation works in place, factors
    of one and repeated computations are removed too.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    is_pure = all(_is_pure(node.target) for node in calls)
    first_nodes: dict[Hashable, Any] = {}
    for node in calls:
        equal = _unchanged_source(node) or (is_pure and (_unscaled_source(node) or _earlier_equal(node, first_nodes)))
        if equal:
            node.replace_all_uses_with(equal)
    graph.eliminate_dead_code()


def _work_in_place(graph: Any, in_place: bool) -> None:
    """Makes elementwise operations overwrite their first operand if nothing reads it afterwards.

    With `in_place`, the operand may be a leaf of the state if the result is the next value of the same leaf. The replay
    that made the state then owns its memory.
    """
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
            continue  # it would read what it overwrites
        is_leaf = operand.op == "placeholder"
        is_own_leaf = is_leaf and in_place and node in outputs and _is_same_leaf(inputs, outputs, operand, node)
        if is_own_leaf or (operand.op == "call_function" and _is_fresh(operand)):
            node.op, node.target = "call_method", IN_PLACE_METHODS[node.target]


def _is_same_leaf(inputs: Sequence[Any], outputs: Sequence[Any], before: Any, after: Any) -> bool:
    """Returns whether both nodes are the same leaf, and no other leaf is a view of it."""
    return [_root(node) for node in outputs].count(after) == 1 and outputs.index(after) == inputs.index(before)


def _root(node: Any) -> Any:
    """Returns the node that a chain of views starts from."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Any) -> bool:
    """Returns whether the result of the node may share memory with its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _is_fresh(node: Any) -> bool:
    """Returns whether the result has its own memory: it is neither a view nor one of several results."""
    return isinstance(node.target, torch._ops.OpOverload) and not _is_view(node)


def _is_pure(target: Any) -> bool:
    """Returns whether the operation leaves its arguments unchanged."""
    return not (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


def _unchanged_source(node: Any) -> Any:
    """Returns the node with the same content that this node is a view of, or None."""
    aten = torch.ops.aten
    if node.target in (
        aten.view.default,
        aten.expand.default,
        aten._unsafe_view.default,
        aten.permute.default,
    ):
        return node.args[0] if _recorded_layout(node) == _recorded_layout(node.args[0]) else None
    if node.target in (aten.t.default, aten.transpose.int):
        inner = node.args[0]
        return inner.args[0] if (inner.target, inner.args[1:]) == (node.target, node.args[1:]) else None
    return None


def _unscaled_source(node: Any) -> Any:
    """Returns the node that this node multiplies by one, or None."""
    is_times_one = node.target == torch.ops.aten.mul.Scalar and node.args[1] == 1
    return node.args[0] if is_times_one and _recorded_layout(node.args[0]) == _recorded_layout(node) else None


def _earlier_equal(node: Any, first_nodes: dict[Hashable, Any]) -> Any:
    """Returns an earlier node with the same operation on the same values, or None. Random draws are never equal."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    first = first_nodes.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
    return None if first is node else first


def _direct_function(target: Any) -> Any:
    """Returns, for example, torch.add for torch.ops.aten.add.Tensor: it finds the same kernel in half the time."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    name = target._schema.name.removeprefix("aten::")
    return getattr(torch, name) if name in DIRECT_FUNCTIONS else target


def _recorded_layout(node: Any) -> Any:
    """Returns shape, strides and type at the time of recording. A missing value is equal to nothing."""
    value = getattr(node, "meta", {}).get("val")
    return object() if not isinstance(value, Tensor) else (tuple(value.shape), value.stride(), value.dtype)
