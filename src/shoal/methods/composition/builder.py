"""The builder of a method, to which pieces add stages, models and predictions.

`compose.py` creates the builder and adds the pieces. Functions that several pieces share are in the other modules of
this folder, such as `aggregation.py` and `clusters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.client.gate import Gate
from shoal.client.sparsity import MeasureSparsity
from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.methods.composition.capability import Capability
from shoal.methods.composition.fit import missing_capability, provides
from shoal.methods.composition.model_functions import (
    one_model_for,
    one_model_init,
    one_model_predict,
    received_model_predict,
)
from shoal.methods.composition.piece import STEPS, Piece
from shoal.methods.composition.setting import Setting
from shoal.stages.contribution import Coefficients
from shoal.stages.experts import expert_for
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.stages.vectors import UNBOUNDED
from shoal.types import (
    ClientId,
    ClientProgram,
    HasPrivacyGuarantee,
    Method,
    ModelsFor,
    ModelsForInputs,
    Predict,
    RepresentationAssigner,
    RoutedPredict,
    ServerState,
    Stage,
    StepSummary,
)

STEPS_AFTER_TRAINING = ("train", "aggregate", "serve", "personalise")
"""The order of stages after training. Personalisation comes last: it starts from the model that a client is served."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class ClientColumn:
    """A value for every client in the server's state: a column of the client table of a stage.

    A call returns the column by client. Clients without a value are missing, and so are all clients before the stage
    has run.
    """

    column: str
    stage: str = "represent"
    num_parts: int = 1  # the number of parts of equal length; a call returns the first part
    bounds: tuple[float, float] = UNBOUNDED  # the smallest and the largest possible entry
    follows_data: bool = False  # True if clients report it again when their data may have changed

    def __call__(self, state: ServerState) -> dict[ClientId, NDArray[np.float64]]:
        table = ClientTable.load(state, self.stage)
        if self.column not in table.columns:
            return {}
        rows = table[self.column].double().numpy()
        return dict(
            zip(table.clients, rows if self.num_parts == 1 else np.split(rows, self.num_parts, axis=1)[0], strict=True)
        )


@dataclass
class MethodBuilder:
    """A method that is being built.

    A comment names the step whose piece sets an optional field.
    """

    setting: Setting
    pieces: Mapping[str, tuple[type[Piece], ...]]  # the pieces of each step; only serve may have several
    stages: dict[str, list[Stage]] = field(default_factory=lambda: {step: [] for step in STEPS})
    init: Callable[[int], ServerState] | None = None  # default: one global model
    models_to_train: ModelsFor = one_model_for
    models_to_serve: ModelsFor | None = None  # default: the models that are trained
    serve_unassigned_clients: Callable[[ModelsFor], ModelsFor] | None = None  # replaces models of clients of no cluster
    training: LocalTraining | None = None  # train: the program that trains one model
    program: ClientProgram | None = None  # train: the program that the cohort runs
    validation_split: str | None = None  # train: the samples on which a client compares its experts
    representation: ClientColumn | None = None  # represent: the vectors by which clients are compared
    sparsity: MeasureSparsity | None = None  # represent
    first_sparsity_round: int = 0  # represent: rounds before it train the extraction model
    aggregation: TrainAndAggregate | None = None  # aggregate: the training stage
    server_updates: list[ServerUpdate] = field(default_factory=list)  # run after aggregation, in this order
    observers: list[ServerUpdate] = field(default_factory=list)  # server updates that only store values for serving
    personalisation: list[Callable[[ModelsFor], tuple[Stage, ...]]] = field(default_factory=list)
    gate: Gate | None = None  # personalise
    coefficients: Coefficients | None = None  # set by the first piece that learns coefficients
    predict: Predict | None = None
    predict_routed: RoutedPredict | None = None
    models_for_inputs: ModelsForInputs | None = None
    cluster_assigner: RepresentationAssigner | None = None
    adaptation_program: ClientProgram | None = None
    uses_cohort_size: bool = True
    notes: tuple[str, ...] = ()

    def provides(self, capability: Capability) -> bool:
        """Returns whether a piece of the method provides the capability."""
        return provides(self.pieces, capability)

    def uses(self, capability: Capability) -> bool:
        """Returns whether a piece of the method requires the capability, or uses it where it is provided."""
        return any(capability in (*p.requires, *p.uses) for classes in self.pieces.values() for p in classes)

    def require(self, piece: Piece, capability: Capability, reason: str = "") -> None:
        """Raises `UserError` if no piece of the method provides the capability."""
        if not self.provides(capability):
            raise UserError(missing_capability(self.pieces, type(piece), capability, reason).sentence)

    def refuse(self, piece: Piece, reason: str) -> NoReturn:
        """Raises `UserError`, because the piece cannot be part of this method."""
        raise UserError(f"{piece.step} is {piece.name!r}, but {reason}")

    def ensure_set(self, value: Value | None, field_name: str) -> Value:
        """Returns the value of a field, which an earlier piece must have set."""
        if value is None:
            raise ValueError(f"no piece of {self.composition()} sets the {field_name} of the method")
        return value

    def use_cluster_models(self) -> None:
        """Lets every client train, and be served, the model of its cluster."""
        self.models_to_train = expert_for
        self.predict = received_model_predict(self.setting.model)

    @property
    def vectors(self) -> ClientColumn:
        """Returns the vectors by which clients are compared, for a piece that requires `VECTORS_BEFORE_TRAINING`."""
        return self.ensure_set(self.representation, "representation")

    @property
    def serving_models_for(self) -> ModelsFor:
        """Returns the function that gives the models that a client is served."""
        return self.models_to_serve or self.models_to_train

    def composition(self) -> str:
        """Returns the pieces of all steps as users write them."""
        return ",".join(f"{step}={'+'.join(p.name for p in classes)}" for step, classes in self.pieces.items())

    def build(self, name: str) -> Method:
        """Returns the method with everything that pieces have added."""
        aggregation = self.ensure_set(self.aggregation, "aggregation")
        training = replace(aggregation, server_updates=tuple(self.server_updates), observers=tuple(self.observers))
        for personalise in self.personalisation:
            self.stages["personalise"] += personalise(self.serving_models_for)
        models_for = (
            self.serve_unassigned_clients(self.serving_models_for)
            if self.serve_unassigned_clients
            else self.serving_models_for
        )
        self._check_programs([training, *(stage for added in self.stages.values() for stage in added)])
        stages_before_training = [stage for step in STEPS[:3] for stage in self.stages[step]]
        stages_after_training = [stage for step in STEPS_AFTER_TRAINING for stage in self.stages[step]]
        model = self.setting.model
        return Method(
            name=name,
            init=self.init or one_model_init(model),
            stages=(*stages_before_training, training, *stages_after_training),
            models_for=models_for,
            predict=self.predict or one_model_predict(model),
            num_classes=model.num_classes,
            uses_cohort_size=self.uses_cohort_size,
            predict_routed=self.predict_routed,
            models_for_inputs=self.models_for_inputs,
            adaptation_program=self.adaptation_program,
            cluster_assigner=self.cluster_assigner,
            steps=tuple(self._step_summaries(training.name)),
            notes=self.notes,
        )

    def _check_programs(self, stages: Sequence[Stage]) -> None:
        """Checks that names of programs are unique and that at most one program adds noise.

        Clients identify programs by name. The guarantees of several programs with noise cannot be combined.
        """
        program_by_name: dict[str, ClientProgram] = {}
        for program in (p for stage in stages for p in stage.programs):
            if program_by_name.setdefault(program.name, program) != program:
                raise ValueError(f"two programs of the method have the name {program.name!r}")
        noisy_programs = [
            k for k, p in program_by_name.items() if isinstance(p, HasPrivacyGuarantee) and p.privacy_guarantee([1], 1)
        ]
        if len(noisy_programs) > 1:
            raise UserError(
                f"clients add noise to what they send in {' and in '.join(noisy_programs)}, but the combined privacy "
                "guarantee is not known; set the noise of all but one of them to 0"
            )

    def _step_summaries(self, training_stage_name: str) -> Iterator[StepSummary]:
        """Yields the stages of every step. If a step has several pieces, the first one gets its stages."""
        for step in STEPS:
            added = tuple(stage.name for stage in self.stages[step])
            first, *others = (piece.name for piece in self.pieces[step])
            yield StepSummary(step, first, (training_stage_name, *added) if step == "train" else added)
            yield from (StepSummary(step, name, ()) for name in others)
