"""Train on the cohort and average what returns into each model."""

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
        return learning_rate(self.schedule, self.lr, round_index, self.rounds, self.decay)


class ServerUpdate:
    """What the server does with a round of training besides aggregating it: any of three moments, none by default."""

    imports_later: ClassVar[tuple[str, ...]] = ()  # as of a stage

    def adjust_plan(self, train: TrainAndAggregate, state: ServerState, plan: Plan) -> Plan:
        """Before clients are asked."""
        return plan

    def before_aggregation(
        self, train: TrainAndAggregate, state: ServerState, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        """When reports have arrived, before they are aggregated: for example to form clusters of what was trained."""
        return state

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        """When reports are aggregated; `before` is the state that they were aggregated into."""
        return after


@dataclass(frozen=True)
class TrainAndAggregate(OneProgram):
    """The cohort trains what it is served; each model becomes the weighted mean of its members' results.

    A client's weight in a model is its membership there (1 where there are no clusters) times its number
    of training rows, or times 1 with `weighting="uniform"`; who has no rows does not count. A stage that chose
    clients by chance may have stored weights that make up for it, which go on top: `weights_from` names it.
    `remember` keeps what the cohort sent, for stages of the next round: the change of each client's model, the
    model, or in summary its loss and the length of its change. `updates` are applied in their order.
    """

    program: ClientProgram
    models_for: ModelsFor
    rate: LearningRate
    weighting: Literal["size", "uniform"] = option(
        "size", "Weight clients in the average by their number of training samples (size) or all equally (uniform)."
    )
    weights_from: str = ""
    remember: Literal["nothing", "update", "model", "summary"] = "nothing"
    trainable: tuple[str, ...] = ()  # of which parameters an update is the change
    mean: MeanFunction = tree.weighted_mean
    server_updates: tuple[ServerUpdate, ...] = ()
    observers: tuple[ServerUpdate, ...] = field(default=(), compare=False)  # keep something for serving, change nothing
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    @property
    def imports_later(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for update in self.server_updates for name in update.imports_later)

    def config(self, state: ServerState) -> dict[str, float]:
        """What goes with every task."""
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
        reports = with_samples(reports)
        merged = {name: self._aggregated_model(state, name, reports) for name in sorted(state.models)}
        return replace(self._with_remembered_reports(state, reports), models=merged)

    def weights(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> dict[ClientId, float]:
        """Who counts in a model, and for how much."""
        model_index, given = sorted(state.models).index(name), self._stored_weights(state)
        found = {c: given.get(c, 1.0) * self._client_weight(state, model_index, c, r) for c, r in reports.items()}
        return {c: w for c, w in found.items() if w > 0}

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
            total, rows = report.metrics["loss"]
            return {"loss": torch.tensor(total / max(1.0, rows)), "norm": update.norm()}

        rows = {c: row(c, r) for c, r in reports.items()}
        return replace(state, memory={**state.memory, self.name: ClientTable.from_rows(rows).to_tree()})

    def _update(self, state: ServerState, client: ClientId, model: Params) -> Tensor:
        """What the client changed in the first model that it was sent."""
        sent = next(iter(self.models_for(state, client).values()))
        return flatten_params({k: model[k] - sent[k] for k in self.trainable})

    def _aggregated_model(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> Params:
        parts = {c: (w, self._reported_params(name, reports[c])) for c, w in self.weights(state, name, reports).items()}
        if not parts:
            return state.models[name]  # nobody of this cluster replied
        return self._weighted_mean(state, parts)

    def _reported_params(self, name: str, report: Report) -> Params:
        """What a client reported of a model that it counts in."""
        return report.tensors["model"]

    def _weighted_mean(self, state: ServerState, parts: Mapping[ClientId, tuple[float, Params]]) -> Params:
        return self.mean([model for _, model in parts.values()], [w for w, _ in parts.values()])

    def _stored_weights(self, state: ServerState) -> dict[ClientId, float]:
        if not self.weights_from:
            return {}
        table = ClientTable.load(state, self.weights_from)
        return dict(zip(table.clients, table["weight"].tolist(), strict=True)) if len(table) else {}

    def _client_weight(self, state: ServerState, model_index: int, client: ClientId, report: Report) -> float:
        member = (
            float(state.membership[client][model_index]) if client in state.membership else float(not state.membership)
        )
        return member * (report.counts["train"] if self.weighting == "size" else 1)


@dataclass(frozen=True)
class AggregateBase(TrainAndAggregate):
    """Of each model a part is sent and averaged; the rest stays with the clients. Its first weights follow from a seed
    that init put into this stage's memory, so that all clients start alike without its being sent."""

    def config(self, state: ServerState) -> dict[str, float]:
        return super().config(state) | {"first": float(state.memory[self.name]["first"])}


@dataclass(frozen=True)
class AggregateWithParticipation(TrainAndAggregate):
    """Clients are told how often one is expected to take part in the whole run."""

    def config(self, state: ServerState) -> dict[str, float]:
        planned = len(state.cohort) * self.rate.rounds // max(1, len(state.roster))
        return super().config(state) | {"planned": float(max(1, planned))}


@dataclass(frozen=True)
class AggregateWithDirection(TrainAndAggregate):
    """What a round changed in the one model is kept, to be sent beside the model in the next."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        after = super().aggregate(state, reports)
        (before,), (now,) = state.models.values(), after.models.values()
        direction = {k: now[k] - before[k] for k in self.trainable}
        return replace(after, memory={**after.memory, self.name: {"direction": direction}})


@dataclass(frozen=True)
class TrainLocally(OneProgram):
    """The cohort goes on training its own models; nothing is shared. First weights follow from a seed
    that init put into this stage's memory, so that all clients start alike without a model being sent."""

    program: ClientProgram
    rate: LearningRate
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        first = float(state.memory[self.name]["first"])
        config = {"lr": self.rate.at(state.round), "first": first}
        return Plan(self.program, {c: Task({}, config, derive_seed(seed, c)) for c in state.cohort})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return state
