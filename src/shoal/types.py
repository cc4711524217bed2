"""The vocabulary of shoal as types. Read this module first, because all others use its types.

A round is a sequence of stages. Each stage plans which client runs which program, the fleet executes the plan, and the
stage folds the reports of the clients into the server's state. A method is a sequence of stages together with the two
functions that define a client's predictions: `models_for` and `predict`.

The round loop in `shoal.engine` is a good module to read next.
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
Tree = dict[str, Any]  # nested dicts with tensors at the leaves: everything that is sent, stored or vmapped


class OnlyIf(NamedTuple):
    """The condition under which an option has an effect."""

    description: str  # the condition in words; "{group}" stands for the first part of the option's name
    is_met: Callable[[Any], bool]  # the condition as a test of the object that has the option


@dataclass(frozen=True)
class Option:
    """The declaration of an option: its meaning, the values that it accepts, and when it has an effect."""

    help: str  # a full sentence
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    only_if: OnlyIf | None = None  # None if the option always has an effect
    value_without_validation: Any = None  # a value that needs no validation samples; None if there is no such value

    def accepts(self, value: Any) -> bool:
        """Returns whether the value lies within the bounds."""
        bounds = ((self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt))
        return all(bound is None or compare(value, bound) for bound, compare in bounds)

    @property
    def range_text(self) -> str:
        """The accepted numbers in words, such as "0 or more". It is empty if every value of the type is accepted."""
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
    """Declares a dataclass field that users may set with `--set`.

    Parameters
    ----------
    default
        The value if users do not set the option.
    help
        What the option sets, as a full sentence with units or values and the default.
    ge, gt, le, lt
        Bounds of a number: greater or equal, greater, less or equal, less.
    only_if
        The condition under which the option has an effect. Without it, setting the option is refused.
    value_without_validation
        A value with which the option needs no validation samples.

    Returns
    -------
    dataclasses.Field
        The field with its declaration.
    """
    return field(default=default, metadata={"option": Option(help, ge, gt, le, lt, only_if, value_without_validation)})


class HasOptions:
    """Base of a dataclass with options. It checks them against their ranges whenever an instance is created."""

    group: ClassVar[str] = ""  # the first part of an option's name; "" if that is the `name` of the instance

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            declared, value = f.metadata.get("option"), getattr(self, f.name)
            if declared is not None and not declared.accepts(value):
                group = self.group or getattr(self, "name", type(self).__name__)
                raise UserError(f"{group}.{f.name} is {value}; it must be {declared.range_text}")


LABEL_COUNTS = "labels"  # key in a client's private tree: its label counts, or an estimate of them
UNLABELLED_SPLIT = "unlabelled"  # the split of a client that has inputs without labels

CENTRALISED_CLIENT: ClientId = "*pool*"  # has the data of all clients; exists in simulations only, on no roster


class Samples(NamedTuple):
    """Labelled samples: inputs and their labels, in the same order."""

    x: Tensor
    y: Tensor


ClientData = Mapping[str, Samples]  # split ("train", "val", "test", or a part such as "train/low") -> samples


class Batch(NamedTuple):
    """The samples of one training step."""

    x: Tensor
    y: Tensor
    w: Tensor  # 1 for a sample, 0 for padding
    key: Tensor  # int64 scalar: the only source of randomness inside a step (dropout, noise)


@dataclass(frozen=True)
class Task:
    """The message from the server to one client."""

    models: Mapping[str, Params] = field(default_factory=dict)  # by name; there may be none, one or several
    config: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    digests: Mapping[str, int] = field(default_factory=dict)  # of the models that the client caches for later tasks
    cached: frozenset[str] = frozenset()  # names of models that the client has cached already: they are not sent


@dataclass(frozen=True)
class Report:
    """The message from one client to the server."""

    tensors: Mapping[str, Params] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, count)
    counts: Mapping[str, int] = field(default_factory=dict)  # split -> number of samples
    flops: int = 0  # floating-point operations of the client; the fleet fills them in


def identity(state: Tree) -> Tree:
    """Returns the state unchanged."""
    return state


@dataclass(frozen=True)
class Phase:
    """Some epochs over one split of the client's data."""

    split: str
    epochs: int
    batch_size: int
    step: Callable[[Tree, Batch], Tree]  # pure and vmappable; a batch has at least one sample that is not padding
    on_end: Callable[[Tree], Tree] = identity  # runs after the last epoch, for example to normalise
    shuffle: bool = True
    precompute: Callable[[Tree, Tensor], Tensor] | None = None  # runs once per sample; its result is the x of batches
    sample_fraction: float = 1.0  # fraction of the samples that is used; drawn once for all epochs

    def num_samples(self, num_available: int) -> int:
        """Returns how many of the available samples an epoch uses: at least one, if there is one."""
        return min(num_available, max(1, round(self.sample_fraction * num_available)))


class ClientProgram(Protocol):
    """A program that clients run. It has access to its task, the client's data and private tree, and nothing else."""

    @property
    def name(self) -> str: ...

    @property
    def phases(self) -> tuple[Phase, ...]: ...

    @property
    def batchable(self) -> bool:
        """Whether clients may be stacked and batches padded. False with batch norm, which mixes samples."""

    def begin(self, task: Task, private: Tree) -> Tree:
        """Returns the state before the first phase."""

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        """Returns the report and the new entries of the private tree, or None if there are none.

        Entries with other names stay in the private tree.
        """


@runtime_checkable
class HasPrivacyGuarantee(Protocol):
    """A program that adds noise to its reports and can state a privacy guarantee."""

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int) -> Mapping[str, float]:
        """Returns the guarantee for all reports of a client together, or an empty mapping if there is no noise.

        Parameters
        ----------
        num_train_samples
            The number of training samples of each client.
        num_tasks
            The largest number of tasks that a client may receive.
        """


@dataclass(frozen=True)
class Plan:
    """The tasks of a stage in one round. A plan without tasks has no work for clients."""

    program: ClientProgram | None = None
    tasks: Mapping[ClientId, Task] = field(default_factory=dict)
    cache_models: bool = False  # whether clients cache the models of their tasks, which are then not sent again
    edge_of_client: Mapping[ClientId, str] = field(default_factory=dict)  # empty if there are no edge servers
    program_of_client: Mapping[ClientId, ClientProgram] = field(default_factory=dict)  # if it is not `program`
    round: int = 0  # counts from 1; the round loop fills in the round and the stage
    stage: str = ""  # empty for an evaluation

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
    """A client's hardware, as far as the server knows it before the client has worked."""

    @property
    def flops_per_s(self) -> float: ...

    @property
    def memory_bytes(self) -> int: ...


class EdgeExchange(NamedTuple):
    """The messages that an edge server and the cloud send each other."""

    report: Report
    task: Task


@dataclass(frozen=True)
class ServerState:
    """Everything that the server knows between rounds. It never contains a client's private tree.

    The round loop sets `roster`, `devices` and `cohort_size` at the beginning of a round. A checkpoint stores `round`,
    `models`, `membership` and `memory` only.
    """

    round: int  # number of completed rounds
    models: Mapping[str, Params]
    membership: Mapping[ClientId, Tensor] = field(default_factory=dict)  # weights over sorted(models)
    roster: tuple[ClientId, ...] = ()  # the clients that are present in this round
    devices: Mapping[ClientId, Device] = field(default_factory=dict)  # some devices may be unknown
    cohort_size: int = 0  # clients per round, for methods that use a cohort size
    cohort: tuple[ClientId, ...] = ()  # the clients of this round; a selection stage sets them
    memory: Mapping[str, Tree] = field(default_factory=dict)  # one slot per stage
    round_metrics: Mapping[str, float] = field(default_factory=dict)  # go into the record of this round
    edge_exchanges: Mapping[str, EdgeExchange] = field(default_factory=dict)  # of this stage, by edge, for the ledger

    def cluster_of(self, client: ClientId | None) -> int | None:
        """Returns the index in `sorted(models)` of the model with the largest weight for the client.

        Returns None for a client without a cluster, which is every client of a method without clusters.
        """
        weights = self.membership.get(client) if client is not None else None
        return None if weights is None else int(weights.argmax())


StagePurpose = Literal["preparation", "training"]
"""What a stage's energy is spent on: preparation (represent, cluster, select, probe) or training."""

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
"""The clients to which a stage sends tasks in a round."""

RECIPIENT_SENTENCES: Mapping[Recipients, str] = {
    "unstated": "the clients that the stage names in its plan receive a task",
    "none": "only the server works",
    "all": "all clients receive a task",
    "cohort": "the clients of the cohort receive a task",
    "candidates": "random candidates for the cohort receive a task",
    "sample": "some random clients receive a task",
    "returning": "clients that are in the cohort for the second time receive a task",
    "late-joining": "clients that have not reported yet receive a task, such as late-joining clients",
    "retry": "the stage repeats this as long as no client has reported",
    "members": "the members of clusters receive a task, once there are clusters",
    "new-members": "members of clusters that have not reported yet receive a task",
    "unassigned": "clients outside all clusters receive a task, once there are clusters",
    "edges": "the edge servers and the cloud exchange models",
}
ONE_TASK_PER_CLIENT: frozenset[Recipients] = frozenset(("returning", "late-joining", "new-members", "unassigned"))
"""A client that reports receives at most one such task."""


@dataclass(frozen=True)
class Rounds:
    """Rounds at equal distances, by their index from 0."""

    first: int = 0
    every: int = 1  # 0 for the first round only
    last: int | None = None  # None for the end of the run

    def __contains__(self, round_index: int) -> bool:
        since = round_index - self.first
        if since < 0 or (self.last is not None and round_index > self.last):
            return False
        return since == 0 or (self.every > 0 and since % self.every == 0)

    def __str__(self) -> str:
        """Returns the rounds in words. They are counted from 1."""
        first, last = self.first + 1, None if self.last is None else self.last + 1
        if self.every == 0:
            return f"round {first}"
        if self.every == 1 and last is not None:
            return f"rounds {first} to {last}"
        if self.every == 1:
            return "every round" if first == 1 else f"round {first} and every round after it"
        return f"round {first} and every {self.every} rounds after it" + (f" up to round {last}" if last else "")


def periodic_rounds(num_rounds: int, every_rounds: int) -> tuple[Rounds, ...]:
    """Returns the rounds in which something periodic happens, which include the last round of the run.

    Parameters
    ----------
    num_rounds
        The number of rounds of the run, or 0 for a run without an end.
    every_rounds
        The distance between two of the rounds.
    """
    last = (Rounds(num_rounds - 1, 0),) if num_rounds % every_rounds else ()
    return last if 0 < num_rounds < every_rounds else (Rounds(every_rounds - 1, every_rounds), *last)


@dataclass(frozen=True)
class Schedule:
    """The clients to which a stage sends tasks, and the rounds in which it does.

    In the rounds of `rounds`, the stage sends tasks to `clients`. In all other rounds after the first of them, it sends
    tasks to `clients_otherwise`. Before the first of them, the stage is not due.
    """

    clients: Recipients = "unstated"
    rounds: tuple[Rounds, ...] = (Rounds(),)  # the union of these; empty if the stage is never due
    clients_otherwise: Recipients = "none"

    def clients_in(self, round_index: int) -> Recipients:
        """Returns which clients receive a task in the round with this index."""
        if any(round_index in rounds for rounds in self.rounds):
            return self.clients
        return self.clients_otherwise if any(rounds.first < round_index for rounds in self.rounds) else "none"

    def due(self, round_index: int) -> bool:
        """Returns whether the stage works in the round with this index."""
        return any(round_index in rounds for rounds in self.rounds) or self.clients_in(round_index) != "none"

    def max_tasks_per_client(self, num_rounds: int) -> int:
        """Returns how many tasks a client that always reports may receive in a run."""
        recipients_by_round = [self.clients_in(index) for index in range(num_rounds)]
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
        first_index = min(r.first for r in self.rounds)
        others = f"In other rounds{f' after round {first_index + 1}' if first_index else ''}"
        return f"{sentence} {others}, {RECIPIENT_SENTENCES[self.clients_otherwise]}."

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule for JSON. Rounds are counted from 1."""
        rounds = [
            {"first": r.first + 1, "every": r.every} | ({} if r.last is None else {"last": r.last + 1})
            for r in self.rounds
        ]
        return {
            "clients": self.clients,
            "rounds": rounds,
            "clients_otherwise": self.clients_otherwise,
            "sentence": str(self),
        }


class Stage(Protocol):
    """The server's side of one step of a round."""

    @property
    def name(self) -> str: ...

    @property
    def purpose(self) -> StagePurpose: ...

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        """Every program that `plan` may send tasks for. A real client must have them beforehand."""

    @property
    def schedule(self) -> Schedule:
        """The clients to which `plan` sends tasks, and when. `explain` and the privacy statement rely on it."""

    def due(self, round_index: int) -> bool:
        """Returns whether the stage works in this round, as its schedule says (see `stages.base.Scheduled`)."""

    def plan(self, state: ServerState, seed: int) -> Plan:
        """Returns the tasks of this round."""

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        """Returns the state after the reports. Some clients, or even all of them, may not have responded."""


class Fleet(Protocol):
    """The clients, and the way in which their work is executed."""

    def roster(self) -> tuple[ClientId, ...]:
        """Returns the clients that are present."""

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Returns the reports. Clients that did not respond are absent."""


class RoutedPrediction(NamedTuple):
    """Predictions in which one of several models is chosen for each sample."""

    logits: Tensor  # samples x classes
    model_index: Tensor  # of the chosen model in the sorted names, for each sample
    confidence: Tensor  # of the chosen model, for each sample, by the rule that chose it


ModelsFor = Callable[[ServerState, ClientId | None], Mapping[str, Params]]
Predict = Callable[[Mapping[str, Params], Tree, Tensor], Tensor]
RoutedPredict = Callable[[Mapping[str, Params], Tree, Tensor], RoutedPrediction]
ModelsForInputs = Callable[[ServerState, Tensor], Mapping[str, Params]]


class RepresentationAssigner(Protocol):
    """Assigns a client to clusters by a representation that the client computed itself."""

    @property
    def representation_bounds(self) -> tuple[float, float]:
        """The lower and upper bound of the entries of a representation."""

    def representation_width(self, state: ServerState) -> int | None:
        """Returns the number of entries of a representation, or None while there are no clusters."""

    def cluster_weights(self, state: ServerState, representation: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the weight of each of the sorted models. The weights sum to 1."""


class StepSummary(NamedTuple):
    """The piece that a method has at a step, and the stages that it added."""

    step: str
    piece: str
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Method:
    """A federated learning method: its stages, and how models serve clients."""

    name: str
    init: Callable[[int], ServerState]
    stages: tuple[Stage, ...]
    models_for: ModelsFor  # the serving models of a client, or of an inference-only client (None)
    predict: Predict  # (models, private, x) -> logits
    num_classes: int
    cohort_size: int = 0  # clients per round: set when the method is built
    uses_cohort_size: bool = True  # False if something else, such as a time budget, limits the cohort
    # Predicts as `predict` does and names the model of each sample. None if models are not chosen by sample.
    predict_routed: RoutedPredict | None = None
    # Returns the serving models of an unseen client from its inputs. None if inputs do not influence them.
    models_for_inputs: ModelsForInputs | None = None
    # An unseen client may run this program on inputs without labels before it predicts.
    adaptation_program: ClientProgram | None = None
    cluster_assigner: RepresentationAssigner | None = None  # None if clusters have no representations
    steps: tuple[StepSummary, ...] = ()  # the pieces; empty if the method is not composed of pieces
    notes: tuple[str, ...] = ()  # facts that a reader of results must know, such as which data leave the clients

    @property
    def programs(self) -> dict[str, ClientProgram]:
        """All programs that clients may run, by name."""
        programs = {p.name: p for stage in self.stages for p in stage.programs}
        if self.adaptation_program is not None:
            programs[self.adaptation_program.name] = self.adaptation_program
        return programs
