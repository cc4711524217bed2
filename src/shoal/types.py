"""The words of shoal as types. Read this first: everything else is written in them.

A round is a sequence of stages. A stage plans (who does what), the fleet executes (what a client runs
is a program), the stage folds the reports into the server's state. A method is a composition of stages,
plus the two functions that say what a client is served: `models_for` and `predict`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import UserError

ClientId = str
Params = dict[str, Tensor]  # a network's parameters and buffers, by name
Tree = dict[str, Any]  # nested dicts with tensors at the leaves: all that is sent, stored or vmapped


class OnlyIf(NamedTuple):
    """When an option has an effect: in words, in which "{group}" stands for the first part of its name, and as a test
    of the object that has the option."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Option:
    """What is said of a field that users may set: its meaning, the values that it takes, and when it has an effect."""

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    only_if: OnlyIf | None = None  # None: always
    without_validation: Any = None  # the value with which no validation samples are needed; None: there is none

    def accepts(self, value: Any) -> bool:
        bounds = ((self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt))
        return all(bound is None or compare(value, bound) for bound, compare in bounds)

    @property
    def range(self) -> str:
        """The accepted numbers in words, such as "0 or more"; empty where every value of the type is accepted."""
        if self.ge is not None and (self.le is not None or self.lt is not None):
            return f"from {self.ge:g} to " + (f"{self.le:g}" if self.le is not None else f"below {self.lt:g}")
        low = f"{self.ge:g} or more" if self.ge is not None else f"above {self.gt:g}" if self.gt is not None else ""
        high = f"at most {self.le:g}" if self.le is not None else f"below {self.lt:g}" if self.lt is not None else ""
        return " and ".join(part for part in (low, high) if part)


def option(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    only_if: OnlyIf | None = None,
    without_validation: Any = None,
) -> Any:
    """A dataclass field that users may set with `--set`: default, meaning (a full sentence), range, the condition
    without which it has no effect and is refused, and the value with which no validation samples are needed."""
    return field(default=default, metadata={"option": Option(help, ge, gt, le, lt, only_if, without_validation)})


class HasOptions:
    """A dataclass whose options are checked against their ranges whenever one is made."""

    group: ClassVar[str] = ""  # the first part of an option's name; "" where it is the instance's `name`

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            declared, value = f.metadata.get("option"), getattr(self, f.name)
            if declared is not None and not declared.accepts(value):
                group = self.group or getattr(self, "name", type(self).__name__)
                raise UserError(f"{group}.{f.name} is {value}; it must be {declared.range}")


LABELS = "labels"  # in a client's private tree: its label counts, or what it takes for them
UNLABELLED = "unlabelled"  # the split of a client that has inputs and no labels

POOL: ClientId = "*pool*"  # every client's data in one place: simulations only, never on a roster


class Examples(NamedTuple):
    x: Tensor
    y: Tensor


ClientData = Mapping[str, Examples]  # split ("train", "val", "test", or a part such as "train/low") -> examples


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    w: Tensor  # 1 for a real row, 0 for padding
    key: Tensor  # int64 scalar: the only source of chance inside a step (dropout, noise)


@dataclass(frozen=True)
class Task:
    """Down to one client."""

    models: Mapping[str, Params] = field(default_factory=dict)  # none, one or many
    config: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    digests: Mapping[str, int] = field(default_factory=dict)  # of models that the client keeps for later tasks
    held: frozenset[str] = frozenset()  # of these, what it has kept from earlier ones: not sent again


@dataclass(frozen=True)
class Report:
    """Up from one client."""

    tensors: Mapping[str, Params] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, count)
    counts: Mapping[str, int] = field(default_factory=dict)  # split -> examples held
    flops: int = 0  # what the client computed for it; filled in by whoever runs the program


def unchanged(s: Tree) -> Tree:
    return s


@dataclass(frozen=True)
class Phase:
    """`epochs` passes over one split of the client's data."""

    split: str
    epochs: int
    batch_size: int
    step: Callable[[Tree, Batch], Tree]  # pure and vmappable; a batch never holds padding only
    finish: Callable[[Tree], Tree] = unchanged  # after the passes: decide, merge, normalise
    shuffle: bool = True
    inputs: Callable[[Tree, Tensor], Tensor] | None = None  # computed of each row once, and what batches hold as x
    share: float = 1.0  # of the rows: drawn once, for all passes

    def taken(self, rows: int) -> int:
        """How many of so many rows a pass goes over: at least one where there is any."""
        return min(rows, max(1, round(self.share * rows)))


class ClientProgram(Protocol):
    """What a client runs. It sees its task, its data and its private tree, nothing else."""

    @property
    def name(self) -> str: ...

    @property
    def phases(self) -> tuple[Phase, ...]: ...

    @property
    def batchable(self) -> bool:
        """Whether clients may be stacked and batches padded (false for batch norm: it mixes rows)."""

    def begin(self, task: Task, private: Tree) -> Tree: ...

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        """The report, and what the client keeps from now on, by name; what it kept under other names stays. None:
        nothing is new."""


@runtime_checkable
class Guaranteed(Protocol):
    """A program that puts noise on its report may say what this protects."""

    def guarantee(self, sizes: Sequence[int], tasks: int) -> Mapping[str, float]:
        """Of all reports of a client together, where clients hold so many training rows and receive so many tasks at
        most; empty without noise."""


@dataclass(frozen=True)
class Plan:
    """Who does what. Without tasks the stage has no client work."""

    program: ClientProgram | None = None
    tasks: Mapping[ClientId, Task] = field(default_factory=dict)
    reuse: bool = False  # clients keep the models of their tasks, and are not sent again what they have
    edges: Mapping[ClientId, str] = field(default_factory=dict)  # which edge asks each client, where there are edges
    others: Mapping[ClientId, ClientProgram] = field(default_factory=dict)  # of clients that do not run `program`

    def by_program(self) -> list[Plan]:
        """Returns a plan for each program, because a fleet executes one program at a time."""
        if not self.others:
            return [self]
        runs = {client: self.others.get(client, self.program) for client in self.tasks}
        return [
            replace(self, program=program, tasks={c: t for c, t in self.tasks.items() if runs[c] == program}, others={})
            for program in {p.name: p for p in runs.values() if p is not None}.values()
        ]


class Device(Protocol):
    """What is known of a client's hardware before it has done anything."""

    @property
    def flops_per_s(self) -> float: ...

    @property
    def memory_bytes(self) -> int: ...


class Relay(NamedTuple):
    """What an edge and the cloud send each other."""

    up: Report
    down: Task


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between rounds. Never a client's private tree."""

    round: int
    models: Mapping[str, Params]
    membership: Mapping[ClientId, Tensor] = field(default_factory=dict)  # weights over sorted(models)
    roster: tuple[ClientId, ...] = ()  # who is there this round: set by the loop, not stored
    devices: Mapping[ClientId, Device] = field(default_factory=dict)  # set by the loop, not stored; some may be unknown
    cohort_size: int = 0  # how many clients take part in a round, where the method goes by it: set by the loop
    cohort: tuple[ClientId, ...] = ()  # who takes part in this round: set by a select stage, not stored
    memory: Mapping[str, Tree] = field(default_factory=dict)  # one slot per stage
    figures: Mapping[str, float] = field(default_factory=dict)  # of this round, for its record: not stored
    relays: Mapping[str, Relay] = field(default_factory=dict)  # of this stage, by edge, for the ledger: not stored

    def cluster_of(self, client: ClientId | None) -> int | None:
        """The index in `sorted(models)` of the model that the client belongs to most. None for a client of no cluster,
        which is every client where there are no clusters."""
        weights = self.membership.get(client) if client is not None else None
        return None if weights is None else int(weights.argmax())


Purpose = Literal["pre", "train"]  # of a stage's work: to prepare (represent, cluster, select, probe) or to train

Asked = Literal[
    "unstated",
    "none",
    "all",
    "cohort",
    "candidates",
    "sample",
    "returning",
    "late-joining",
    "retry",
    "members",
    "new-members",
    "unassigned",
    "edges",
]
"""To which clients a stage sends tasks in a round."""

ASKED: Mapping[Asked, str] = {
    "unstated": "the clients that the stage names in its plan receive a task",
    "none": "only the server works",
    "all": "all clients receive a task",
    "cohort": "the clients of the cohort receive a task",
    "candidates": "random candidates for the cohort receive a task",
    "sample": "some random clients receive a task",
    "returning": "clients that take part for the second time receive a task",
    "late-joining": "clients that have not reported yet receive a task, such as late-joining clients",
    "retry": "the stage repeats this as long as no client has reported",
    "members": "the members of clusters receive a task, once there are clusters",
    "new-members": "members of clusters that have not reported yet receive a task",
    "unassigned": "clients outside all clusters receive a task, once there are clusters",
    "edges": "the edge servers and the cloud exchange models",
}
ONCE_EACH: frozenset[Asked] = frozenset(("returning", "late-joining", "new-members", "unassigned"))
"""A client that reports receives one such task at most."""


@dataclass(frozen=True)
class Rounds:
    """Rounds at equal distances, by their index from 0."""

    first: int = 0
    every: int = 1  # 0: only the first
    last: int | None = None  # None: to the end of the run

    def __contains__(self, round: int) -> bool:
        since = round - self.first
        if since < 0 or (self.last is not None and round > self.last):
            return False
        return since == 0 or (self.every > 0 and since % self.every == 0)

    def __str__(self) -> str:
        """As people count them, from 1."""
        first, last = self.first + 1, None if self.last is None else self.last + 1
        if self.every == 0:
            return f"round {first}"
        if self.every == 1 and last is not None:
            return f"rounds {first} to {last}"
        if self.every == 1:
            return "every round" if first == 1 else f"round {first} and every round after it"
        return f"round {first} and every {self.every} rounds after it" + (f" up to round {last}" if last else "")


def evaluated_rounds(rounds: int, every: int) -> tuple[Rounds, ...]:
    """Every so many rounds, and the last of the run (0: it has no end)."""
    last = (Rounds(rounds - 1, 0),) if rounds % every else ()
    return last if 0 < rounds < every else (Rounds(every - 1, every), *last)


@dataclass(frozen=True)
class Schedule:
    """To which clients a stage sends tasks, and in which rounds.

    In the other rounds after the first of `rounds` it sends them to `others`; before that one it is not due.
    """

    clients: Asked = "unstated"
    rounds: tuple[Rounds, ...] = (Rounds(),)  # any of them; none: never
    others: Asked = "none"

    def asks(self, round: int) -> Asked:
        """Which clients receive a task in the round with this index."""
        if any(round in rounds for rounds in self.rounds):
            return self.clients
        return self.others if any(rounds.first < round for rounds in self.rounds) else "none"

    def due(self, round: int) -> bool:
        return any(round in rounds for rounds in self.rounds) or self.asks(round) != "none"

    def most_tasks(self, rounds: int) -> int:
        """How many tasks one client may receive in a run of so many rounds if it always reports."""
        asked = [self.asks(round) for round in range(rounds)]
        own = min(1, len(asked)) if self.clients in ONCE_EACH else asked.count(self.clients)
        repeated = self.others not in (*ONCE_EACH, "retry", "none", self.clients)
        return 0 if self.clients == "none" else own + (asked.count(self.others) if repeated else 0)

    def __str__(self) -> str:
        if not self.rounds:
            return "The stage is never due."
        *most, last = map(str, self.rounds)
        said = f"In {', '.join(most)}{', and ' if most else ''}{last}, {ASKED[self.clients]}."
        if self.others == "none" or any(r.every == 1 and r.last is None for r in self.rounds):
            return said
        first = min(r.first for r in self.rounds)
        return f"{said} In other rounds{f' after round {first + 1}' if first else ''}, {ASKED[self.others]}."

    def facts(self) -> dict[str, Any]:
        """For JSON; rounds are counted from 1."""
        rounds = [
            {"first": r.first + 1, "every": r.every} | ({} if r.last is None else {"last": r.last + 1})
            for r in self.rounds
        ]
        return {"clients": self.clients, "rounds": rounds, "others": self.others, "sentence": str(self)}


class Stage(Protocol):
    """The server's side of one step of a round."""

    @property
    def name(self) -> str: ...

    @property
    def purpose(self) -> Purpose: ...

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        """Every program that `plan` may ask clients to run: a real client must know them beforehand."""

    @property
    def schedule(self) -> Schedule:
        """To which clients `plan` sends tasks, and in which rounds: what `explain` and the privacy statement say."""

    def due(self, round: int) -> bool:
        """As the schedule says: `stages.base.Scheduled`."""

    def plan(self, state: ServerState, seed: int) -> Plan: ...

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        """Reports are partial by nature: some clients are silent, sometimes all are."""


class Fleet(Protocol):
    """The clients, and how their work is executed."""

    def roster(self) -> tuple[ClientId, ...]: ...

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """The silent are absent."""


class Answer(NamedTuple):
    """What one of several models says to each row."""

    logits: Tensor  # rows x classes
    expert: Tensor  # of each row: which model answered, by its place in the sorted names
    score: Tensor  # of each row: how sure that model is, by the rule that chose it


ModelsFor = Callable[[ServerState, ClientId | None], Mapping[str, Params]]
Predict = Callable[[Mapping[str, Params], Tree, Tensor], Tensor]
Route = Callable[[Mapping[str, Params], Tree, Tensor], Answer]
Assign = Callable[[ServerState, Tensor], Mapping[str, Params]]


class AssignsByRepresentation(Protocol):
    """Says which clusters a client belongs to, by a representation of it that it computed itself."""

    @property
    def representation_bounds(self) -> tuple[float, float]:
        """Between which numbers the entries of a representation lie."""

    def representation_width(self, state: ServerState) -> int | None:
        """How many numbers a representation has; None while there are no clusters."""

    def cluster_weights(self, state: ServerState, representation: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weight of each of the sorted models; they sum to 1."""


class Part(NamedTuple):
    """Which piece stands at a step of a method, and the stages that it laid."""

    step: str
    piece: str
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    name: str
    init: Callable[[int], ServerState]
    stages: tuple[Stage, ...]
    models_for: ModelsFor  # what a client is sent; None: an inference-only client
    predict: Predict  # (models, private, x) -> logits
    classes: int
    cohort_size: int = 0  # clients per round: set when the method is built
    uses_cohort_size: bool = True  # False where something else, such as a time budget, says how many take part
    route: Route | None = None  # as `predict`, and which model answered; None where no model is chosen by its input
    assign: Assign | None = None  # as `models_for` of an unseen client, by its inputs; None where these tell nothing
    adapt: ClientProgram | None = None  # what an unseen client may run on inputs without labels before it is served
    clusters: AssignsByRepresentation | None = None  # None where the method keeps no representations of clusters
    parts: tuple[Part, ...] = ()  # what it is composed of; none where it was written as one
    notes: tuple[str, ...] = ()  # what whoever reads the result should know, such as which data left the clients

    @property
    def programs(self) -> dict[str, ClientProgram]:
        found = {p.name: p for stage in self.stages for p in stage.programs}
        return found if self.adapt is None else found | {self.adapt.name: self.adapt}
