"""Selection and weighting of clients by their contribution (APCSMA).

The coefficients of a client's metrics are learned on samples of the server. `shoal.selectors.contribution` computes
the metrics.
"""

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
CLIENT_METRICS: tuple[str, ...] = ("num", "epoch", "acc", "loss")  # the columns of metrics, with the names of the paper
ADAM_EPS = 1e-4  # with the 1e-8 of torch, rounding errors of a gradient that is 0 would become full steps


@dataclass(frozen=True)
class Coefficients(HasOptions):
    """Learns the coefficient of each metric by a few steps of Adam on the server's samples (Eq. 11).

    The steps start with equal coefficients and reduce the loss of the mixed model. Without samples or steps the
    coefficients stay equal. A step changes the logarithm of a coefficient by at most `lr`, so that with 10 steps of
    0.1 the largest of four coefficients is at most 0.71. The coefficients therefore show a direction and not how much
    a metric matters. At the minimum of the loss nearly always a single coefficient is 1.
    """

    group: ClassVar[str] = "coefficients"
    model: Model
    public_samples: Samples | None = None  # None: the samples that clients shared, if any
    steps: int = option(
        10, "Learn the coefficients of the client metrics by this many steps of Adam. 0 keeps them equal.", ge=0
    )
    lr: float = option(
        0.1,
        "Move the logarithm of a coefficient by at most this learning rate in one step of Adam.",
        gt=0,
        only_if=OnlyIf("coefficients.steps is above 0", lambda coefficients: coefficients.steps > 0),
    )

    def server_samples(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels that the server has."""
        return (
            shared_samples(state, self.model)
            if self.public_samples is None
            else (self.public_samples.x, self.public_samples.y)
        )

    def learn(self, metrics: Floats, models: Tensor, template: Params, state: ServerState) -> Floats:
        """Returns the coefficients for metrics [clients, columns] and the clients' models, a row each."""
        centre = torch.zeros(metrics.shape[1], device=self.model.device)
        x, y = self.server_samples(state)
        if not self.steps or not len(y):
            return np.full(metrics.shape[1], 1 / metrics.shape[1])
        corners, trainable = _models_by_metric(metrics, models, template), set(self.model.trainable)

        def loss(theta: Params) -> Tensor:
            """Returns the loss of the mixed model: the sum over clients of ContriFunc_i W_i is a V with V = M' W."""
            a = theta["theta"].softmax(-1)
            detached = a.detach()  # no gradients through the statistics of batch norm
            mixed = {
                k: torch.tensordot(a if k in trainable else detached, v, dims=1) if v.is_floating_point() else v
                for k, v in corners.items()
            }
            return F.cross_entropy(self.model.predict(mixed, x), y)

        theta, adam = {"theta": centre}, Adam(self.lr, eps=ADAM_EPS)
        adam_state, first_loss = adam.init(theta), torch.inf
        for step in range(self.steps):
            gradients, value = grad_and_value(loss)(theta)
            first_loss = float(value) if step == 0 else first_loss
            theta, adam_state = adam.update(theta, gradients, adam_state)
        with torch.no_grad():
            has_improved = float(loss(theta)) <= first_loss  # false for NaN
        return (theta["theta"] if has_improved else centre).double().softmax(-1).cpu().numpy()


def _models_by_metric(metrics: Floats, models: Tensor, template: Params) -> Params:
    """Returns, for every metric, the mean of the clients' models weighted by this metric alone: V = M' W."""
    rows = torch.from_numpy(metrics.T.copy()).float() @ models
    models_by_metric = [unflatten_params(row, template) for row in rows]
    return {
        k: torch.stack([m[k] for m in models_by_metric]) if x.is_floating_point() else x for k, x in template.items()
    }


def _coefficient_metrics(stage: str, coefficients: Floats, names: Sequence[str] = CLIENT_METRICS) -> dict[str, float]:
    return {f"{stage}.coefficient_{name}": float(a) for name, a in zip(names, coefficients, strict=True)}


def _comparable_clients(reported: ClientTable) -> ClientTable:
    """Returns the clients with samples and finite values, because a diverged client cannot be compared."""
    if not len(reported):
        return reported
    is_finite = reported["loss"].isfinite() & reported["accuracy"].isfinite() & reported["model"].isfinite().all(1)
    return reported.filter(((reported["size"] > 0) & is_finite).numpy())


@dataclass(frozen=True)
class SelectByContribution(ServerOnly):
    """Selects the clients that contribute most (Eq. 10, Alg. 1), by the metrics and models of their last training.

    With `start="warm"` every new client is selected in addition, which are all clients in the first round. Clients
    that did not respond then are selected again in turn, one in each round, instead of the selected client that
    contributes least. With "cold" a client that has not trained is represented by the metrics that it measured with
    the first model that it received, and by that model. With `metrics="fresh"` all clients measure their metrics again
    in every round, but the mixed models are still those that they sent last.
    """

    coefficients: Coefficients
    start: Literal["warm", "cold"] = option(
        "warm",
        "With warm every client is selected in the first round. With cold a client that has never trained is "
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
        (template,) = state.models.values()
        queried, trained = self._queried_clients(state), set(ClientTable.load(state, TRAIN_STAGE).clients)
        comparable, is_warm = _comparable_clients(self._client_metrics(state)), self.start == "warm"
        new = [c for c in state.roster if c not in queried | trained] if is_warm else []
        not_responding = sorted(c for c in queried - trained if c in set(state.roster)) if is_warm else []
        if is_warm:
            state = self._with_queried_clients(state, queried | set(new))
        if not len(comparable):
            return replace(state, cohort=tuple(new or not_responding))
        metrics = contribution.metrics(*(comparable[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
        coefficients = self.coefficients.learn(metrics, comparable["model"], template, state)  # Eq. 11
        repeated = [not_responding[state.round % len(not_responding)]] if not_responding else []
        selected = select_largest(
            metrics @ coefficients, np.ones(len(comparable), dtype=bool), max(0, state.cohort_size - len(repeated))
        )
        cohort = tuple(sorted({*comparable.client_ids(selected), *new, *repeated}))
        return replace(
            state, cohort=cohort, round_metrics={**state.round_metrics, **_coefficient_metrics(self.name, coefficients)}
        )

    def _queried_clients(self, state: ServerState) -> set[ClientId]:
        return set(ClientTable.load(state, self.name).clients)

    def _with_queried_clients(self, state: ServerState, queried: set[ClientId]) -> ServerState:
        table = ClientTable.from_rows({c: {"asked": torch.tensor(True)} for c in queried})
        return replace(state, memory={**state.memory, self.name: table.to_tree()})

    def _with_first_models(self, state: ServerState) -> ServerState:
        """Returns the state that remembers the model with which each client was first measured, for a cold start."""
        if self.start == "warm":
            return state
        (model,) = state.models.values()
        remembered, remembered_clients = ClientTable.load(state, self.name), set(self._queried_clients(state))
        measured = ClientTable.load(state, MEASURE_STAGE)
        new = {c: {"model": flatten_params(model)} for c in measured.clients if c not in remembered_clients}
        return (
            replace(
                state, memory={**state.memory, self.name: remembered.updated_with(ClientTable.from_rows(new)).to_tree()}
            )
            if new
            else state
        )

    def _client_metrics(self, state: ServerState) -> ClientTable:
        """Returns size, number of participations, accuracy, loss and model of the present clients."""
        trained, measured = (
            t.filter(t.is_present(state.roster))
            for t in (ClientTable.load(state, s) for s in (TRAIN_STAGE, MEASURE_STAGE))
        )
        new = measured.filter(~measured.is_present(trained.clients))
        if self.start == "cold" and len(new):
            first = ClientTable.load(state, self.name)
            columns = {"size": new["size"], "accuracy": new["accuracy"], "loss": new["loss_after"], "told": new["told"]}
            columns |= {"count": torch.zeros(len(new)), "model": first.filter(first.is_present(new.clients))["model"]}
            trained = trained.updated_with(ClientTable(new.clients, columns))
        if self.metrics == "last" or not len(trained):
            return trained
        is_newer = torch.from_numpy(measured.column("told", trained.clients)) > trained["told"]
        now = {
            "accuracy": measured.column("accuracy", trained.clients),
            "loss": measured.column("loss_after", trained.clients),
        }
        fresh = {k: torch.where(is_newer, torch.from_numpy(v), trained[k].double()) for k, v in now.items()}
        return ClientTable(trained.clients, {**trained.columns, **fresh})


@dataclass(frozen=True)
class AggregateByContribution(TrainAndAggregate):
    """Trains the cohort and averages each model by the contributions of its members (Eq. 12 and 13).

    The directions of the clients' models can be further metrics (Eq. 15). With `weight_by="size"` the weights are the
    numbers of samples alone. The last metrics and models of all clients that ever trained are remembered.
    """

    coefficients: Coefficients | None = None
    weight_by: Literal["size", "contribution", "cosine"] = "cosine"
    cache_models: bool = False

    def plan(self, state: ServerState, seed: int) -> Plan:
        return replace(super().plan(state, seed), cache_models=self.cache_models)

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        reported = ClientTable.load(state, self.name).updated_with(self._reported_metrics(state, reports))
        after = super().aggregate(state, reports)
        if self.weight_by != "size":
            names = enumerate(sorted(state.models))
            model_and_metrics = {
                k: self._weighted_model(state, i, k, reported, reports) or (after.models[k], {}) for i, k in names
            }
            new_metrics = {k: v for _, metrics in model_and_metrics.values() for k, v in metrics.items()}
            models = {k: model for k, (model, _) in model_and_metrics.items()}
            after = replace(after, models=models, round_metrics={**after.round_metrics, **new_metrics})
        return replace(after, memory={**after.memory, self.name: reported.to_tree()})

    def _reported_metrics(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ClientTable:
        before = ClientTable.load(state, self.name)
        participations = before.to_dict("count")

        def row(client: ClientId, report: Report) -> dict[str, Tensor]:
            means = {k: report.metrics[k][0] / max(1.0, report.metrics[k][1]) for k in ("accuracy", "loss_after")}
            model = report.tensors["model"]
            norm = {"norm": self._update(state, client, model).norm()} if self.remember == "summary" else {}
            return norm | {
                "size": torch.tensor(report.counts["train"]),
                "count": torch.tensor(participations.get(client, 0.0) + 1),
                "accuracy": torch.tensor(means["accuracy"]),
                "loss": torch.tensor(means["loss_after"]),
                "model": flatten_params(model),
                "told": torch.tensor(state.round),
            }

        return ClientTable.from_rows({c: row(c, r) for c, r in reports.items()})

    def _weighted_model(
        self, state: ServerState, model_index: int, name: str, reported: ClientTable, reports: Mapping[ClientId, Report]
    ) -> tuple[Params, dict[str, float]] | None:
        """Returns the model and the coefficients as metrics, or None if no client can be compared."""
        assert self.coefficients is not None
        before = state.models[name]
        members = {c: r for c, r in with_samples(reports).items() if self._client_weight(state, model_index, c, r) > 0}
        comparable = _comparable_clients(reported.filter(reported.is_present(tuple(members))))
        if not len(comparable):
            return None
        members = {c: members[c] for c in comparable.clients}
        columns, metrics = (
            CLIENT_METRICS,
            contribution.metrics(*(comparable[k].double().numpy() for k in ("size", "count", "accuracy", "loss"))),
        )
        if self.weight_by == "cosine":
            cosines = self._direction_cosines(before, list(members.values()))
            columns, metrics = (*columns, *cosines), contribution.with_directions(metrics, list(cosines.values()))
        coefficients = self.coefficients.learn(metrics, comparable["model"], before, state)
        weights = dict(zip(comparable.clients, (metrics @ coefficients).tolist(), strict=True))
        memberships = {c: self._client_weight(state, model_index, c, r) / r.counts["train"] for c, r in members.items()}
        mean = tree.weighted_mean(  # Eq. 13
            [r.tensors["model"] for r in members.values()], [weights[c] * memberships[c] for c in members]
        )
        label = self.name if len(state.models) == 1 else f"{self.name} {name}"
        return mean, _coefficient_metrics(label, coefficients, columns)

    def _direction_cosines(self, before: Params, reports: list[Report]) -> dict[str, Floats]:
        """Returns the cosines between the clients' base and head and those of the global model (Eq. 14).

        Only trainable parameters count. A network that consists of a head alone has no base.
        """
        assert self.coefficients is not None
        head, cosines_by_part = set(self.coefficients.model.head), {}
        parts = {"base": [k for k in self.trainable if k not in head], "head": [k for k in self.trainable if k in head]}
        for name, keys in parts.items():
            if keys:
                rows = [flatten_params({k: r.tensors["model"][k] for k in keys}).numpy() for r in reports]
                cosines_by_part[name] = contribution.cosines(
                    np.stack(rows), flatten_params({k: before[k] for k in keys}).numpy()
                )
        return cosines_by_part


@dataclass(frozen=True)
class Kappa(HasOptions):
    """Sets the κ of a round, which is part of the task."""

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
        """Returns the κ of a round."""
        return learning_rate(self.schedule, self.kappa, round_index, self.rounds, self.decay)


@dataclass(frozen=True)
class UpdatePersonalModels(OneProgram):
    """Sends the new model to all clients, not only the cohort, to update their personal models by `program`.

    All clients get the same `kappa`, which may change from round to round.
    """

    program: ClientProgram
    models_for: ModelsFor
    kappa: Kappa
    name: str = "update"
    purpose: ClassVar[StagePurpose] = "training"
    schedule: ClassVar[Schedule] = Schedule("all")

    def plan(self, state: ServerState, seed: int) -> Plan:
        config = {"kappa": self.kappa.at(state.round)}
        tasks = {c: Task(self.models_for(state, c), config, derive_seed(seed, c)) for c in state.roster}
        return Plan(self.program, tasks, cache_models=True)

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, round_metrics={**state.round_metrics, f"{self.name}.kappa": self.kappa.at(state.round)})
