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

    description: str
    is_met: Callable[[Any], bool]


@dataclass(frozen=True)
class Option:
    """What is said of a field that users may set: its meaning, the values that it takes, and when it has an effect."""

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    only_if: OnlyIf | None = None  # None: always
    value_without_validation: Any = None  # the value with which no validation samples are needed; None: there is none

    def accepts(self, value: Any) -> bool:
        bounds = ((self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt))
        return all(bound is None or compare(value, bound) for bound, compare in bounds)

    @property
    def range_text(self) -> str:
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
    value_without_validation: Any = None,
) -> Any:
    """A dataclass field that users may set with `--set`: default, meaning (a full sentence), range, the condition
    without which it has no effect and is refused, and the value with which no validation samples are needed."""
    return field(default=default, metadata={"option": Option(help, ge, gt, le, lt, only_if, value_without_validation)})


class HasOptions:
    """A dataclass whose options are checked against their ranges whenever one is made."""

    group: ClassVar[str] = ""  # the first part of an option's name; "" where it is the instance's `name`

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            declared, value = f.metadata.get("option"), getattr(self, f.name)
            if declared is not None and not declared.accepts(value):
                group = self.group or getattr(self, "name", type(self).__name__)
                raise UserError(f"{group}.{f.name} is {value}; it must be {declared.range_text}")


LABEL_COUNTS = "labels"  # in a client's private tree: its label counts, or what it takes for them
UNLABELLED_SPLIT = "unlabelled"  # the split of a client that has inputs and no labels

CENTRALISED_CLIENT: ClientId = "*pool*"  # every client's data in one place: simulations only, never on a roster


class Samples(NamedTuple):
    x: Tensor
    y: Tensor


ClientData = Mapping[str, Samples]  # split ("train", "val", "test", or a part such as "train/low") -> examples


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
    cached: frozenset[str] = frozenset()  # of these, what it has kept from earlier ones: not sent again


@dataclass(frozen=True)
class Report:
    """Up from one client."""

    tensors: Mapping[str, Params] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, count)
    counts: Mapping[str, int] = field(default_factory=dict)  # split -> examples held
    flops: int = 0  # what the client computed for it; filled in by whoever runs the program


def identity(state: Tree) -> Tree:
    return state


@dataclass(frozen=True)
class Phase:
    """`epochs` passes over one split of the client's data."""

    split: str
    epochs: int
    batch_size: int
    step: Callable[[Tree, Batch], Tree]  # pure and vmappable; a batch never holds padding only
    on_end: Callable[[Tree], Tree] = identity  # after the passes: decide, merge, normalise
    shuffle: bool = True
    precompute: Callable[[Tree, Tensor], Tensor] | None = None  # computed of each row once, and what batches hold as x
    sample_fraction: float = 1.0  # of the rows: drawn once, for all passes

    def num_samples(self, num_available: int) -> int:
        """How many of so many rows a pass goes over: at least one where there is any."""
        return min(num_available, max(1, round(self.sample_fraction * num_available)))


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

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        """The report, and what the client keeps from now on, by name; what it kept under other names stays. None:
        nothing is new."""


@runtime_checkable
class HasPrivacyGuarantee(Protocol):
    """A program that puts noise on its report may say what this protects."""

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int) -> Mapping[str, float]:
        """Of all reports of a client together, where clients hold so many training rows and receive so many tasks at
        most; empty without noise."""


@dataclass(frozen=True)
class Plan:
    """Who does what. Without tasks the stage has no client work."""

    program: ClientProgram | None = None
    tasks: Mapping[ClientId, Task] = field(default_factory=dict)
    cache_models: bool = False  # clients keep the models of their tasks, and are not sent again what they have
    edge_of_client: Mapping[ClientId, str] = field(
        default_factory=dict
    )  # which edge asks each client, where there are edges
    program_of_client: Mapping[ClientId, ClientProgram] = field(
        default_factory=dict
    )  # of clients that do not run `program`

    def by_program(self) -> list[Plan]:
        """Returns a plan for each program, because a fleet executes one program at a time."""
        if not self.program_of_client:
            return [self]
        runs = {client: self.program_of_client.get(client, self.program) for client in self.tasks}
        return [
            replace(
                self,
                program=program,
                tasks={c: t for c, t in self.tasks.items() if runs[c] == program},
                program_of_client={},
            )
            for program in {p.name: p for p in runs.values() if p is not None}.values()
        ]


class Device(Protocol):
    """What is known of a client's hardware before it has done anything."""

    @property
    def flops_per_s(self) -> float: ...

    @property
    def memory_bytes(self) -> int: ...


class EdgeExchange(NamedTuple):
    """What an edge and the cloud send each other."""

    report: Report
    task: Task


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
    round_metrics: Mapping[str, float] = field(default_factory=dict)  # of this round, for its record: not stored
    edge_exchanges: Mapping[str, EdgeExchange] = field(
        default_factory=dict
    )  # of this stage, by edge, for the ledger: not stored

    def cluster_of(self, client: ClientId | None) -> int | None:
        """The index in `sorted(models)` of the model that the client belongs to most. None for a client of no cluster,
        which is every client where there are no clusters."""
        weights = self.membership.get(client) if client is not None else None
        return None if weights is None else int(weights.argmax())


StagePurpose = Literal["pre", "train"]  # of a stage's work: to prepare (represent, cluster, select, probe) or to train

Recipients = Literal[
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

RECIPIENT_SENTENCES: Mapping[Recipients, str] = {
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
ONE_TASK_PER_CLIENT: frozenset[Recipients] = frozenset(("returning", "late-joining", "new-members", "unassigned"))
"""A client that reports receives one such task at most."""


@dataclass(frozen=True)
class Rounds:
    """Rounds at equal distances, by their index from 0."""

    first: int = 0
    every: int = 1  # 0: only the first
    last: int | None = None  # None: to the end of the run

    def __contains__(self, round_index: int) -> bool:
        since = round_index - self.first
        if since < 0 or (self.last is not None and round_index > self.last):
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


def periodic_rounds(num_rounds: int, every_rounds: int) -> tuple[Rounds, ...]:
    """Every so many rounds, and the last of the run (0: it has no end)."""
    last = (Rounds(num_rounds - 1, 0),) if num_rounds % every_rounds else ()
    return last if 0 < num_rounds < every_rounds else (Rounds(every_rounds - 1, every_rounds), *last)


@dataclass(frozen=True)
class Schedule:
    """To which clients a stage sends tasks, and in which rounds.

    In the other rounds after the first of `rounds` it sends them to `others`; before that one it is not due.
    """

    clients: Recipients = "unstated"
    rounds: tuple[Rounds, ...] = (Rounds(),)  # any of them; none: never
    clients_otherwise: Recipients = "none"

    def clients_in(self, round_index: int) -> Recipients:
        """Which clients receive a task in the round with this index."""
        if any(round_index in rounds for rounds in self.rounds):
            return self.clients
        return self.clients_otherwise if any(rounds.first < round_index for rounds in self.rounds) else "none"

    def due(self, round_index: int) -> bool:
        return any(round_index in rounds for rounds in self.rounds) or self.clients_in(round_index) != "none"

    def max_tasks_per_client(self, num_rounds: int) -> int:
        """How many tasks one client may receive in a run of so many rounds if it always reports."""
        recipients_by_round = [self.clients_in(round) for round in range(num_rounds)]
        num_scheduled = (
            min(1, len(recipients_by_round))
            if self.clients in ONE_TASK_PER_CLIENT
            else recipients_by_round.count(self.clients)
        )
        repeated = self.clients_otherwise not in (*ONE_TASK_PER_CLIENT, "retry", "none", self.clients)
        return (
            0
            if self.clients == "none"
            else num_scheduled + (recipients_by_round.count(self.clients_otherwise) if repeated else 0)
        )

    def __str__(self) -> str:
        if not self.rounds:
            return "The stage is never due."
        *earlier, last = map(str, self.rounds)
        sentence = f"In {', '.join(earlier)}{', and ' if earlier else ''}{last}, {RECIPIENT_SENTENCES[self.clients]}."
        if self.clients_otherwise == "none" or any(r.every == 1 and r.last is None for r in self.rounds):
            return sentence
        first = min(r.first for r in self.rounds)
        return f"{sentence} In other rounds{f' after round {first + 1}' if first else ''}, {RECIPIENT_SENTENCES[self.clients_otherwise]}."

    def to_json(self) -> dict[str, Any]:
        """For JSON; rounds are counted from 1."""
        rounds = [
            {"first": r.first + 1, "every": r.every} | ({} if r.last is None else {"last": r.last + 1})
            for r in self.rounds
        ]
        return {"clients": self.clients, "rounds": rounds, "others": self.clients_otherwise, "sentence": str(self)}


class Stage(Protocol):
    """The server's side of one step of a round."""

    @property
    def name(self) -> str: ...

    @property
    def purpose(self) -> StagePurpose: ...

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        """Every program that `plan` may ask clients to run: a real client must know them beforehand."""

    @property
    def schedule(self) -> Schedule:
        """To which clients `plan` sends tasks, and in which rounds: what `explain` and the privacy statement say."""

    def due(self, round_index: int) -> bool:
        """As the schedule says: `stages.base.Scheduled`."""

    def plan(self, state: ServerState, seed: int) -> Plan: ...

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        """Reports are partial by nature: some clients are silent, sometimes all are."""


class Fleet(Protocol):
    """The clients, and how their work is executed."""

    def roster(self) -> tuple[ClientId, ...]: ...

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """The silent are absent."""


class RoutedPrediction(NamedTuple):
    """What one of several models says to each row."""

    logits: Tensor  # rows x classes
    model_index: Tensor  # of each row: which model answered, by its place in the sorted names
    confidence: Tensor  # of each row: how sure that model is, by the rule that chose it


ModelsFor = Callable[[ServerState, ClientId | None], Mapping[str, Params]]
Predict = Callable[[Mapping[str, Params], Tree, Tensor], Tensor]
RoutedPredict = Callable[[Mapping[str, Params], Tree, Tensor], RoutedPrediction]
ModelsForInputs = Callable[[ServerState, Tensor], Mapping[str, Params]]


class RepresentationAssigner(Protocol):
    """Says which clusters a client belongs to, by a representation of it that it computed itself."""

    @property
    def representation_bounds(self) -> tuple[float, float]:
        """Between which numbers the entries of a representation lie."""

    def representation_width(self, state: ServerState) -> int | None:
        """How many numbers a representation has; None while there are no clusters."""

    def cluster_weights(self, state: ServerState, representation: NDArray[np.float64]) -> NDArray[np.float64]:
        """The weight of each of the sorted models; they sum to 1."""


class StepSummary(NamedTuple):
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
    num_classes: int
    cohort_size: int = 0  # clients per round: set when the method is built
    uses_cohort_size: bool = True  # False where something else, such as a time budget, says how many take part
    predict_routed: RoutedPredict | None = (
        None  # as `predict`, and which model answered; None where no model is chosen by its input
    )
    models_for_inputs: ModelsForInputs | None = (
        None  # as `models_for` of an unseen client, by its inputs; None where these tell nothing
    )
    adaptation_program: ClientProgram | None = (
        None  # what an unseen client may run on inputs without labels before it is served
    )
    cluster_assigner: RepresentationAssigner | None = None  # None where the method keeps no representations of clusters
    steps: tuple[StepSummary, ...] = ()  # what it is composed of; none where it was written as one
    notes: tuple[str, ...] = ()  # what whoever reads the result should know, such as which data left the clients

    @property
    def programs(self) -> dict[str, ClientProgram]:
        found = {p.name: p for stage in self.stages for p in stage.programs}
        return (
            found
            if self.adaptation_program is None
            else found | {self.adaptation_program.name: self.adaptation_program}
        )
