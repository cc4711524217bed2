"""Clients chosen and weighed by how much they contribute, with coefficients learned on rows that the server holds
(APCSMA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from shoal import tree
from shoal.client.adam import Adam
from shoal.client.sgd import RateSchedule, learning_rate
from shoal.client_table import ClientTable
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.selectors import contribution
from shoal.selectors.sampling import Floats, select_largest
from shoal.stages.base import OneProgram, ServerOnly, with_samples
from shoal.stages.prediction_similarity import shared_samples
from shoal.stages.train import TrainAndAggregate
from shoal.stages.vectors import flatten_params, unflatten_params
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    OnlyIf,
    Params,
    Plan,
    Report,
    Samples,
    Schedule,
    ServerState,
    StagePurpose,
    Task,
    option,
)

TRAIN_STAGE, MEASURE_STAGE = "train", "measure"
CLIENT_METRICS: tuple[str, ...] = ("num", "epoch", "acc", "loss")  # columns of metrics, as the paper calls them
ADAM_EPS = 1e-4  # of Adam: with torch's 1e-8 the rounding errors of a slope that is 0 become steps of full length


@dataclass(frozen=True)
class Coefficients(HasOptions):
    """How much each metric counts: from the centre of the simplex a few steps of Adam towards where the loss of the
    mixed model on the server's rows is small (Eq. 11). Without rows or steps it is the centre.

    A step moves a coefficient's logarithm by `lr` at most, so that with 10 steps of 0.1 the largest of four is never
    above 0.71: figures tell a direction, not how much a metric matters. The minimum itself is a corner, nearly always.
    """

    group: ClassVar[str] = "learn"
    model: Model
    public_samples: Samples | None = None  # else what clients shared, if they did
    steps: int = option(
        10, "Learn the coefficients of the client metrics by this many steps of Adam. 0 keeps them equal.", ge=0
    )
    lr: float = option(
        0.1,
        "Move the logarithm of a coefficient by at most this learning rate in one step of Adam.",
        gt=0,
        only_if=OnlyIf("learn.steps is above 0", lambda learn: learn.steps > 0),
    )

    def server_samples(self, state: ServerState) -> tuple[Tensor, Tensor]:
        return (
            shared_samples(state, self.model)
            if self.public_samples is None
            else (self.public_samples.x, self.public_samples.y)
        )

    def learn(self, metrics: Floats, models: Tensor, template: Params, state: ServerState) -> Floats:
        """Of metrics [clients, columns] and the clients' models, a row each."""
        centre = torch.zeros(metrics.shape[1], device=self.model.device)
        x, y = self.server_samples(state)
        if not self.steps or not len(y):
            return np.full(metrics.shape[1], 1 / metrics.shape[1])
        corners, trainable = _models_by_metric(metrics, models, template), set(self.model.trainable)

        def loss(theta: Params) -> Tensor:
            """Of one model, the mean of the corners: sum over clients of ContriFunc_i W_i is a V with V = M' W."""
            a = theta["theta"].softmax(-1)
            still = a.detach()  # statistics of batch norm have no slopes
            mixed = {
                k: torch.tensordot(a if k in trainable else still, v, dims=1) if v.is_floating_point() else v
                for k, v in corners.items()
            }
            return F.cross_entropy(self.model.predict(mixed, x), y)

        theta, adam = {"theta": centre}, Adam(self.lr, eps=ADAM_EPS)
        adam_state, first = adam.init(theta), torch.inf
        for step in range(self.steps):
            gradients, value = grad_and_value(loss)(theta)
            first = float(value) if step == 0 else first
            theta, adam_state = adam.update(theta, gradients, adam_state)
        with torch.no_grad():
            better = float(loss(theta)) <= first  # false where it is no number
        return (theta["theta"] if better else centre).double().softmax(-1).cpu().numpy()


def _models_by_metric(metrics: Floats, models: Tensor, template: Params) -> Params:
    """For every metric the model that clients' models have in the mean by it alone: V = M' W, one product."""
    rows = torch.from_numpy(metrics.T.copy()).float() @ models
    found = [unflatten_params(row, template) for row in rows]
    return {k: torch.stack([m[k] for m in found]) if x.is_floating_point() else x for k, x in template.items()}


def _coefficient_metrics(stage: str, coefficients: Floats, names: Sequence[str] = CLIENT_METRICS) -> dict[str, float]:
    return {f"{stage}.coefficient_{name}": float(a) for name, a in zip(names, coefficients, strict=True)}


def _comparable_clients(reported: ClientTable) -> ClientTable:
    """Those of whom there is something to count: with rows, and with numbers that are numbers. Who diverged says
    nothing about the others."""
    if not len(reported):
        return reported
    finite = reported["loss"].isfinite() & reported["accuracy"].isfinite() & reported["model"].isfinite().all(1)
    return reported.filter(((reported["size"] > 0) & finite).numpy())


@dataclass(frozen=True)
class SelectByContribution(ServerOnly):
    """The clients that contribute most (Eq. 10, Alg. 1). Metrics and models are those with which clients last
    took part.

    With `start="warm"` whoever has not been asked yet is, beside the others: in the first round everybody. Who was
    silent then is asked again in its turn, one a round, in the place of the least of the chosen. With "cold" clients
    count with what they tell of the model that they are sent when they come, which then stands for theirs. With
    `metrics="fresh"` everybody tells anew in every round, of the model that it has then; what is mixed is still what it
    last sent.
    """

    coefficients: Coefficients
    start: Literal["warm", "cold"] = option(
        "warm",
        "With warm every client takes part in the first round. With cold a client that has never taken part is "
        "represented by the model with which it was first measured.",
    )
    metrics: Literal["last", "fresh"] = option(
        "last",
        "Judge clients by the metrics of their last training (last) or by metrics that all clients measure again in "
        "every round (fresh).",
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        state = self._with_first_models(state)
        (like,) = state.models.values()
        asked, trained = self._queried_clients(state), set(ClientTable.load(state, TRAIN_STAGE).clients)
        known, warm = _comparable_clients(self._client_metrics(state)), self.start == "warm"
        new = [c for c in state.roster if c not in asked | trained] if warm else []
        silent = sorted(c for c in asked - trained if c in set(state.roster)) if warm else []
        if warm:
            state = self._with_queried_clients(state, asked | set(new))
        if not len(known):
            return replace(state, cohort=tuple(new or silent))
        table = contribution.metrics(*(known[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
        a = self.coefficients.learn(table, known["model"], like, state)  # Eq. 11
        again = [silent[state.round % len(silent)]] if silent else []
        chosen = select_largest(table @ a, np.ones(len(known), dtype=bool), max(0, state.cohort_size - len(again)))
        cohort = tuple(sorted({*known.client_ids(chosen), *new, *again}))
        return replace(
            state, cohort=cohort, round_metrics={**state.round_metrics, **_coefficient_metrics(self.name, a)}
        )

    def _queried_clients(self, state: ServerState) -> set[ClientId]:
        return set(ClientTable.load(state, self.name).clients)

    def _with_queried_clients(self, state: ServerState, queried: set[ClientId]) -> ServerState:
        table = ClientTable.from_rows({c: {"asked": torch.tensor(True)} for c in queried})
        return replace(state, memory={**state.memory, self.name: table.to_tree()})

    def _with_first_models(self, state: ServerState) -> ServerState:
        """A cold client is represented by the model that it was measured with, which is kept."""
        if self.start == "warm":
            return state
        (model,) = state.models.values()
        kept, known_clients = ClientTable.load(state, self.name), set(self._queried_clients(state))
        measured = ClientTable.load(state, MEASURE_STAGE)
        new = {c: {"model": flatten_params(model)} for c in measured.clients if c not in known_clients}
        return (
            replace(state, memory={**state.memory, self.name: kept.updated_with(ClientTable.from_rows(new)).to_tree()})
            if new
            else state
        )

    def _client_metrics(self, state: ServerState) -> ClientTable:
        """Of those who are there: rows, participations, accuracy, loss, model."""
        known, measured = (
            t.filter(t.is_present(state.roster))
            for t in (ClientTable.load(state, s) for s in (TRAIN_STAGE, MEASURE_STAGE))
        )
        new = measured.filter(~measured.is_present(known.clients))
        if self.start == "cold" and len(new):
            first = ClientTable.load(state, self.name)
            columns = {"size": new["size"], "accuracy": new["accuracy"], "loss": new["loss_after"], "told": new["told"]}
            columns |= {"count": torch.zeros(len(new)), "model": first.filter(first.is_present(new.clients))["model"]}
            known = known.updated_with(ClientTable(new.clients, columns))
        if self.metrics == "last" or not len(known):
            return known
        is_newer = torch.from_numpy(measured.column("told", known.clients)) > known["told"]
        now = {
            "accuracy": measured.column("accuracy", known.clients),
            "loss": measured.column("loss_after", known.clients),
        }
        fresh = {k: torch.where(is_newer, torch.from_numpy(v), known[k].double()) for k, v in now.items()}
        return ClientTable(known.clients, {**known.columns, **fresh})


@dataclass(frozen=True)
class AggregateByContribution(TrainAndAggregate):
    """The cohort trains; each model becomes the mean of its members' results, weighed by their contribution (Eq. 12 and
    13), for which their models' directions may count too (Eq. 15), or by their rows alone. What everybody who ever took
    part told and sent last is kept."""

    coefficients: Coefficients | None = None
    weight_by: Literal["size", "contribution", "cosine"] = "cosine"
    cache_models: bool = False

    def plan(self, state: ServerState, seed: int) -> Plan:
        return replace(super().plan(state, seed), cache_models=self.cache_models)

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        known = ClientTable.load(state, self.name).updated_with(self._reported_metrics(state, reports))
        after = super().aggregate(state, reports)
        if self.weight_by != "size":
            names = enumerate(sorted(state.models))
            weighed = {k: self._weighted_model(state, i, k, known, reports) or (after.models[k], {}) for i, k in names}
            figures = {k: v for _, told in weighed.values() for k, v in told.items()}
            models = {k: model for k, (model, _) in weighed.items()}
            after = replace(after, models=models, round_metrics={**after.round_metrics, **figures})
        return replace(after, memory={**after.memory, self.name: known.to_tree()})

    def _reported_metrics(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ClientTable:
        before = ClientTable.load(state, self.name)
        times = dict(zip(before.clients, before["count"].tolist(), strict=True)) if len(before) else {}

        def row(client: ClientId, report: Report) -> dict[str, Tensor]:
            told = {k: report.metrics[k][0] / max(1.0, report.metrics[k][1]) for k in ("accuracy", "loss_after")}
            model = report.tensors["model"]
            norm = {"norm": self._update(state, client, model).norm()} if self.remember == "summary" else {}
            return norm | {
                "size": torch.tensor(report.counts["train"]),
                "count": torch.tensor(times.get(client, 0.0) + 1),
                "accuracy": torch.tensor(told["accuracy"]),
                "loss": torch.tensor(told["loss_after"]),
                "model": flatten_params(model),
                "told": torch.tensor(state.round),
            }

        return ClientTable.from_rows({c: row(c, r) for c, r in reports.items()})

    def _weighted_model(
        self, state: ServerState, model_index: int, name: str, reported: ClientTable, reports: Mapping[ClientId, Report]
    ) -> tuple[Params, dict[str, float]] | None:
        """The model, and the coefficients; None where nobody can be compared, as when everybody diverged."""
        assert self.coefficients is not None
        before = state.models[name]
        inside = {c: r for c, r in with_samples(reports).items() if self._client_weight(state, model_index, c, r) > 0}
        comparable = _comparable_clients(reported.filter(reported.is_present(tuple(inside))))
        if not len(comparable):
            return None
        inside = {c: inside[c] for c in comparable.clients}
        columns, table = (
            CLIENT_METRICS,
            contribution.metrics(*(comparable[k].double().numpy() for k in ("size", "count", "accuracy", "loss"))),
        )
        if self.weight_by == "cosine":
            cosines = self._direction_cosines(before, list(inside.values()))
            columns, table = (*columns, *cosines), contribution.with_directions(table, list(cosines.values()))
        a = self.coefficients.learn(table, comparable["model"], before, state)
        weights = dict(zip(comparable.clients, (table @ a).tolist(), strict=True))
        member = {c: self._client_weight(state, model_index, c, r) / r.counts["train"] for c, r in inside.items()}
        mean = tree.weighted_mean(  # Eq. 13
            [r.tensors["model"] for r in inside.values()], [weights[c] * member[c] for c in inside]
        )
        label = self.name if len(state.models) == 1 else f"{self.name} {name}"
        return mean, _coefficient_metrics(label, a, columns)

    def _direction_cosines(self, before: Params, reports: list[Report]) -> dict[str, Floats]:
        """How much base and head point where the global model's do, as trainable parameters in one row (Eq. 14). A
        network that is all head has no base."""
        assert self.coefficients is not None
        head, found = set(self.coefficients.model.head), {}
        parts = {"base": [k for k in self.trainable if k not in head], "head": [k for k in self.trainable if k in head]}
        for name, part in parts.items():
            if part:
                rows = [flatten_params({k: r.tensors["model"][k] for k in part}).numpy() for r in reports]
                found[name] = contribution.cosines(np.stack(rows), flatten_params({k: before[k] for k in part}).numpy())
        return found


@dataclass(frozen=True)
class Kappa(HasOptions):
    """The κ of a round, sent with the task."""

    group: ClassVar[str] = "update"
    rounds: int
    kappa: float = option(
        0.2, "Mix this fraction of a better personal model into the received global model (Eq. 16).", ge=0, le=1
    )
    schedule: RateSchedule = option(
        "constant",
        "Change kappa over the rounds by this schedule, which train.schedule describes for the learning rate.",
        only_if=OnlyIf("update.kappa is above 0", lambda update: update.kappa > 0),
    )
    decay: float = option(
        0.1,
        "Reduce kappa to this fraction by the last round.",
        ge=0,
        le=1,
        only_if=OnlyIf(
            "update.kappa is above 0 and update.schedule is not constant",
            lambda update: update.kappa > 0 and update.schedule != "constant",
        ),
    )

    def at(self, round_index: int) -> float:
        return learning_rate(self.schedule, self.kappa, round_index, self.rounds, self.decay)


@dataclass(frozen=True)
class UpdatePersonalModels(OneProgram):
    """Everybody, not only the cohort, is sent the new model and makes of it what `program` does, with a `kappa` that is
    the same for all and may change from round to round."""

    program: ClientProgram
    models_for: ModelsFor
    kappa: Kappa
    name: str = "update"
    purpose: ClassVar[StagePurpose] = "train"
    schedule: ClassVar[Schedule] = Schedule("all")

    def plan(self, state: ServerState, seed: int) -> Plan:
        config = {"kappa": self.kappa.at(state.round)}
        tasks = {c: Task(self.models_for(state, c), config, derive_seed(seed, c)) for c in state.roster}
        return Plan(self.program, tasks, cache_models=True)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, round_metrics={**state.round_metrics, f"{self.name}.kappa": self.kappa.at(state.round)})
