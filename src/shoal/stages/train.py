"""Training of the cohort, and aggregation of the trained models.

`TrainAndAggregate` is the base class of all training stages. A `ServerUpdate` adds a step before or after aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal import tree
from shoal.client.sgd import RateSchedule, learning_rate
from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram, with_samples
from shoal.stages.vectors import flatten_params
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    OnlyIf,
    Params,
    Plan,
    Report,
    Schedule,
    ServerState,
    StagePurpose,
    Task,
    option,
)

MeanFunction = Callable[[Sequence[Params], Sequence[float]], Params]
"""(the models that clients trained, their weights) -> the new model"""


@dataclass(frozen=True)
class LearningRate(HasOptions):
    """The learning rate of a round, sent with the task."""

    group: ClassVar[str] = "train"
    lr: float
    rounds: int
    schedule: RateSchedule = option(
        "constant",
        "Change the learning rate over the rounds. cosine and exponential lower it smoothly, step lowers it after one "
        "and after two thirds of the run, and warmup-cosine raises it for a twentieth of the run before cosine.",
    )
    decay: float = option(
        0.1,
        "Reduce the learning rate to this fraction by the last round.",
        gt=0,
        le=1,
        only_if=OnlyIf("train.schedule is not constant", lambda rate: rate.schedule != "constant"),
    )

    def at(self, round_index: int) -> float:
        """Returns the learning rate of a round."""
        return learning_rate(self.schedule, self.lr, round_index, self.rounds, self.decay)


class ServerUpdate:
    """A hook of the server in training: before tasks are sent, before aggregation and after it."""

    imports_later: ClassVar[tuple[str, ...]] = ()  # libraries that are imported when the update first runs

    def adjust_plan(self, train: TrainAndAggregate, state: ServerState, plan: Plan) -> Plan:
        """Returns the plan to use, before tasks are sent."""
        return plan

    def before_aggregation(
        self, train: TrainAndAggregate, state: ServerState, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        """Returns the state before the reports are aggregated, for example with clusters of the trained models."""
        return state

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        """Returns the state after aggregation. `before` is the state before it."""
        return after


@dataclass(frozen=True)
class TrainAndAggregate(OneProgram):
    """Lets the cohort train and sets each model to the weighted mean of its members' trained models.

    A client's weight in a model is its membership (1 without clusters) times its number of training samples, or times 1
    with `weighting="uniform"`. A client without samples has weight 0. `weights_from` names a selection stage that
    stored a weight for each client, which corrects for unequal selection probabilities and is multiplied with the
    weight above. `remember` makes the cohort's reports available to stages of the next round: the update of each
    client, its model, or its loss and the norm of its update. `server_updates` are applied in their order.
    """

    program: ClientProgram
    models_for: ModelsFor
    rate: LearningRate
    weighting: Literal["size", "uniform"] = option(
        "size", "Weight clients in the average by their number of training samples (size) or all equally (uniform)."
    )
    weights_from: str = ""
    remember: Literal["nothing", "update", "model", "summary"] = "nothing"
    trainable: tuple[str, ...] = ()  # the parameters that local training changes
    mean: MeanFunction = tree.weighted_mean
    server_updates: tuple[ServerUpdate, ...] = ()
    # Observers write to the state's memory, which serving uses. They do not change the models.
    observers: tuple[ServerUpdate, ...] = field(default=(), compare=False)
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "training"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    @property
    def imports_later(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for update in self.server_updates for name in update.imports_later)

    def config(self, state: ServerState) -> dict[str, float]:
        """Returns the configuration that is part of every task."""
        return {"lr": self.rate.at(state.round)}

    def plan(self, state: ServerState, seed: int) -> Plan:
        config = self.config(state)
        tasks = {c: Task(self.models_for(state, c), config, derive_seed(seed, c)) for c in state.cohort}
        plan = Plan(self.program, tasks)
        for update in self.server_updates:
            plan = update.adjust_plan(self, state, plan)
        return plan

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        for update in self.server_updates:
            state = update.before_aggregation(self, state, reports, seed)
        after = self.aggregate(state, reports)
        for update in (*self.server_updates, *self.observers):
            after = update.after_aggregation(self, state, after, reports)
        return after

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        """Returns the state with the aggregated models."""
        reports = with_samples(reports)
        merged = {name: self._aggregated_model(state, name, reports) for name in sorted(state.models)}
        return replace(self._with_remembered_reports(state, reports), models=merged)

    def weights(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> dict[ClientId, float]:
        """Returns the clients that have a weight in a model, and their weights."""
        model_index, stored = sorted(state.models).index(name), self._stored_weights(state)
        weights = {c: stored.get(c, 1.0) * self._client_weight(state, model_index, c, r) for c, r in reports.items()}
        return {c: w for c, w in weights.items() if w > 0}

    def _with_remembered_reports(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        if self.remember == "nothing":
            return state

        def row(client: ClientId, report: Report) -> dict[str, Tensor]:
            model = report.tensors["model"]
            if self.remember == "model":
                return {"model": flatten_params(model)}
            update = self._update(state, client, model)
            if self.remember == "update":
                return {"update": update}
            total, num_samples = report.metrics["loss"]
            return {"loss": torch.tensor(total / max(1.0, num_samples)), "norm": update.norm()}

        rows = {c: row(c, r) for c, r in reports.items()}
        return replace(state, memory={**state.memory, self.name: ClientTable.from_rows(rows).to_tree()})

    def _update(self, state: ServerState, client: ClientId, model: Params) -> Tensor:
        """Returns how training changed the model that the client received (the first one if there were several)."""
        sent = next(iter(self.models_for(state, client).values()))
        return flatten_params({k: model[k] - sent[k] for k in self.trainable})

    def _aggregated_model(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> Params:
        parts = {c: (w, self._reported_params(name, reports[c])) for c, w in self.weights(state, name, reports).items()}
        if not parts:
            return state.models[name]  # no client of this cluster reported
        return self._weighted_mean(state, parts)

    def _reported_params(self, name: str, report: Report) -> Params:
        """Returns the parameters that a client reported for a model."""
        return report.tensors["model"]

    def _weighted_mean(self, state: ServerState, parts: Mapping[ClientId, tuple[float, Params]]) -> Params:
        return self.mean([model for _, model in parts.values()], [w for w, _ in parts.values()])

    def _stored_weights(self, state: ServerState) -> dict[ClientId, float]:
        if not self.weights_from:
            return {}
        table = ClientTable.load(state, self.weights_from)
        return table.to_dict("weight")

    def _client_weight(self, state: ServerState, model_index: int, client: ClientId, report: Report) -> float:
        member = (
            float(state.membership[client][model_index]) if client in state.membership else float(not state.membership)
        )
        return member * (report.counts["train"] if self.weighting == "size" else 1)


@dataclass(frozen=True)
class AggregateBaseLayers(TrainAndAggregate):
    """Sends and averages only the base layers of each model. The head stays private.

    The initial weights of the head follow from a seed that `init` stored in this stage's memory, so that all clients
    start with the same weights and need not receive them.
    """

    def config(self, state: ServerState) -> dict[str, float]:
        return super().config(state) | {"first": float(state.memory[self.name]["first"])}


@dataclass(frozen=True)
class AggregateWithParticipation(TrainAndAggregate):
    """Also sends each client how often it is expected to be selected in the whole run."""

    def config(self, state: ServerState) -> dict[str, float]:
        planned = len(state.cohort) * self.rate.rounds // max(1, len(state.roster))
        return super().config(state) | {"planned": float(max(1, planned))}


@dataclass(frozen=True)
class AggregateWithDirection(TrainAndAggregate):
    """Remembers how a round changed the global model. Clients receive this change with the model in the next round."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        after = super().aggregate(state, reports)
        (before,), (updated,) = state.models.values(), after.models.values()
        direction = {k: updated[k] - before[k] for k in self.trainable}
        return replace(after, memory={**after.memory, self.name: {"direction": direction}})


@dataclass(frozen=True)
class TrainLocally(OneProgram):
    """Lets the cohort continue the training of its personal models. Nothing is shared.

    The initial weights follow from a seed that `init` stored in this stage's memory, so that all clients start with the
    same weights and need not receive them.
    """

    program: ClientProgram
    rate: LearningRate
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "training"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        first = float(state.memory[self.name]["first"])
        config = {"lr": self.rate.at(state.round), "first": first}
        return Plan(self.program, {c: Task({}, config, derive_seed(seed, c)) for c in state.cohort})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return state
