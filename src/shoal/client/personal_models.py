"""Personal models: a second model beside the shared one (Ditto), or a personal head (FedPer, FedRep)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.types import Batch, ClientProgram, HasOptions, Params, Phase, Report, Task, Tree, identity, option


@dataclass(frozen=True)
class TrainSharedAndPersonal:
    """Trains the received model with `shared` and sends it, then trains and keeps the personal model."""

    shared: ClientProgram
    personal: LocalTraining
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.shared.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the shared model, then those of the personal one.

        The order of samples follows from the number of a phase. The shared model comes first, so that its training is
        the same as without a personal model.
        """
        both = {"shared": self.shared, "personal": self.personal}
        return tuple(_in_substate(key, phase) for key, program in both.items() for phase in program.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        """Returns both states. The learning rate of the task is for the shared model only."""
        alone = replace(task, config={})
        return {"shared": self.shared.begin(task, private), "personal": self.personal.begin(alone, private)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.shared.end(task, state["shared"], counts)
        return report, {"model": self.personal.current_model(state["personal"])}


def _in_substate(key: str, phase: Phase) -> Phase:
    """Returns a phase of a program whose state is an entry of a larger state."""

    def step(state: Tree, batch: Batch) -> Tree:
        return state | {key: phase.step(state[key], batch)}

    def on_end(state: Tree) -> Tree:
        return state | {key: phase.on_end(state[key])}

    return replace(phase, step=step, on_end=identity if phase.on_end is identity else on_end)


@dataclass(frozen=True)
class KeepHead(HasOptions):
    """Trains the received base with the client's own head, sends the base and keeps the head.

    The first head follows from a seed in the task's config.
    """

    training: LocalTraining
    name: str = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.training.model
        if len(model.head) == len(model.trainable):
            raise UserError(
                f"model {model.name} has one layer only; it must have two or more, since clients share all but the last"
            )

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def training_sequence(self) -> tuple[LocalTraining, ...]:
        """The trainings of the same model, which are done one after the other."""
        return (self.training,)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(
            replace(phase, on_end=partial(switch_trained_part, training, after) if after else identity)
            for training, after in zip_longest(self.training_sequence, self.training_sequence[1:])
            for phase in training.phases
        )

    def begin(self, task: Task, private: Tree) -> Tree:
        (base,) = task.models.values()
        head = private["head"] if "head" in private else self.initial_head(int(task.config["first"]))
        return self.training_sequence[0].begin(replace(task, models={"model": base | head}), {})

    def initial_head(self, seed: int) -> Params:
        """Returns the head of a client that has none yet."""
        _, head = self.training.model.split_base_and_head(self.training.model.init(seed))
        return head

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training_sequence[-1].end(task, state, counts)
        base, head = self.training.model.split_base_and_head(report.tensors["model"])
        return replace(report, tensors={"model": base}), {"head": head}


@dataclass(frozen=True)
class TrainHeadThenBase(KeepHead):
    """Trains only the head for `head_epochs`, then only the base for the epochs of `training`."""

    head_epochs: int = option(
        10,
        "Train only the last layer for this many epochs before all other layers. 0 leaves the last layer as it is.",
        ge=0,
    )

    @property
    def training_sequence(self) -> tuple[LocalTraining, ...]:
        head = replace(self.training, part="head", epochs=self.head_epochs)
        return head, replace(self.training, part="base")


def switch_trained_part(before: LocalTraining, after: LocalTraining, state: Tree) -> Tree:
    """Returns the state in which `after` starts from the model that `before` has trained."""
    model = before.current_model(state)
    return {"lr": state["lr"], "loss": state["loss"]} | after.start_at(model, anchor=model)
