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
from shoal.stages.base import OneProgram, with_rows
from shoal.stages.vectors import vector
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

Mean = Callable[[Sequence[Params], Sequence[float]], Params]
"""(the models that clients trained, their weights) -> the new model"""


@dataclass(frozen=True)
class Rate(HasOptions):
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

    def at(self, round: int) -> float:
        return learning_rate(self.schedule, self.lr, round, self.rounds, self.decay)


class ServerUpdate:
    """What the server does with a round of training besides aggregating it: any of three moments, none by default."""

    imports_later: ClassVar[tuple[str, ...]] = ()  # as of a stage

    def adjust_plan(self, train: Federate, state: ServerState, plan: Plan) -> Plan:
        """Before clients are asked."""
        return plan

    def before(self, train: Federate, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        """When reports have arrived, before they are aggregated: for example to form clusters of what was trained."""
        return state

    def after(
        self, train: Federate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        """When reports are aggregated; `before` is the state that they were aggregated into."""
        return after


@dataclass(frozen=True)
class Federate(OneProgram):
    """The cohort trains what it is served; each model becomes the weighted mean of its members' results.

    A client's weight in a model is its membership there (1 where there are no clusters) times its number
    of training rows, or times 1 with `weighting="uniform"`; who has no rows does not count. A stage that chose
    clients by chance may have stored weights that make up for it, which go on top: `weights_from` names it.
    `remember` keeps what the cohort sent, for stages of the next round: the change of each client's model, the
    model, or in summary its loss and the length of its change. `updates` are applied in their order.
    """

    program: ClientProgram
    models_for: ModelsFor
    rate: Rate
    weighting: Literal["size", "uniform"] = option(
        "size", "Weight clients in the average by their number of training samples (size) or all equally (uniform)."
    )
    weights_from: str = ""
    remember: Literal["nothing", "update", "model", "summary"] = "nothing"
    trainable: tuple[str, ...] = ()  # of which parameters an update is the change
    mean: Mean = tree.weighted_mean
    updates: tuple[ServerUpdate, ...] = ()
    observers: tuple[ServerUpdate, ...] = field(default=(), compare=False)  # keep something for serving, change nothing
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    @property
    def imports_later(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for update in self.updates for name in update.imports_later)

    def config(self, state: ServerState) -> dict[str, float]:
        """What goes with every task."""
        return {"lr": self.rate.at(state.round)}

    def plan(self, state: ServerState, seed: int) -> Plan:
        config = self.config(state)
        tasks = {c: Task(self.models_for(state, c), config, derive_seed(seed, c)) for c in state.cohort}
        plan = Plan(self.program, tasks)
        for update in self.updates:
            plan = update.adjust_plan(self, state, plan)
        return plan

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        for update in self.updates:
            state = update.before(self, state, reports, seed)
        after = self.aggregate(state, reports)
        for update in (*self.updates, *self.observers):
            after = update.after(self, state, after, reports)
        return after

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        reports = with_rows(reports)
        merged = {name: self._merged(state, name, reports) for name in sorted(state.models)}
        return replace(self._remembering(state, reports), models=merged)

    def weights(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> dict[ClientId, float]:
        """Who counts in a model, and for how much."""
        place, given = sorted(state.models).index(name), self._given(state)
        found = {c: given.get(c, 1.0) * self._weight(state, place, c, r) for c, r in reports.items()}
        return {c: w for c, w in found.items() if w > 0}

    def _remembering(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        if self.remember == "nothing":
            return state

        def row(client: ClientId, report: Report) -> dict[str, Tensor]:
            model = report.tensors["model"]
            if self.remember == "model":
                return {"model": vector(model)}
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
        return vector({k: model[k] - sent[k] for k in self.trainable})

    def _merged(self, state: ServerState, name: str, reports: Mapping[ClientId, Report]) -> Params:
        parts = {c: (w, self._sent(name, reports[c])) for c, w in self.weights(state, name, reports).items()}
        if not parts:
            return state.models[name]  # nobody of this cluster replied
        return self._mean(state, parts)

    def _sent(self, name: str, report: Report) -> Params:
        """What a client reported of a model that it counts in."""
        return report.tensors["model"]

    def _mean(self, state: ServerState, parts: Mapping[ClientId, tuple[float, Params]]) -> Params:
        return self.mean([model for _, model in parts.values()], [w for w, _ in parts.values()])

    def _given(self, state: ServerState) -> dict[ClientId, float]:
        if not self.weights_from:
            return {}
        table = ClientTable.load(state, self.weights_from)
        return dict(zip(table.clients, table["weight"].tolist(), strict=True)) if len(table) else {}

    def _weight(self, state: ServerState, place: int, client: ClientId, report: Report) -> float:
        member = float(state.membership[client][place]) if client in state.membership else float(not state.membership)
        return member * (report.counts["train"] if self.weighting == "size" else 1)


@dataclass(frozen=True)
class FederatePart(Federate):
    """Of each model a part is sent and averaged; the rest stays with the clients. Its first weights follow from a seed
    that init put into this stage's memory, so that all clients start alike without its being sent."""

    def config(self, state: ServerState) -> dict[str, float]:
        return super().config(state) | {"first": float(state.memory[self.name]["first"])}


@dataclass(frozen=True)
class FederatePlanned(Federate):
    """Clients are told how often one is expected to take part in the whole run."""

    def config(self, state: ServerState) -> dict[str, float]:
        planned = len(state.cohort) * self.rate.rounds // max(1, len(state.roster))
        return super().config(state) | {"planned": float(max(1, planned))}


@dataclass(frozen=True)
class FederateDirected(Federate):
    """What a round changed in the one model is kept, to be sent beside the model in the next."""

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        after = super().aggregate(state, reports)
        (before,), (now,) = state.models.values(), after.models.values()
        direction = {k: now[k] - before[k] for k in self.trainable}
        return replace(after, memory={**after.memory, self.name: {"direction": direction}})


@dataclass(frozen=True)
class TrainAlone(OneProgram):
    """The cohort goes on training its own models; nothing is shared. First weights follow from a seed
    that init put into this stage's memory, so that all clients start alike without a model being sent."""

    program: ClientProgram
    rate: Rate
    name: str = "train"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("cohort")

    def plan(self, state: ServerState, seed: int) -> Plan:
        first = float(state.memory[self.name]["first"])
        config = {"lr": self.rate.at(state.round), "first": first}
        return Plan(self.program, {c: Task({}, config, derive_seed(seed, c)) for c in state.cohort})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return state
