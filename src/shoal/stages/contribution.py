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
from shoal.selectors.sampling import Floats, largest
from shoal.stages.base import OneProgram, ServerOnly, with_rows
from shoal.stages.prediction_similarity import shared_rows
from shoal.stages.train import Federate
from shoal.stages.vectors import restored, vector
from shoal.types import (
    ClientId,
    ClientProgram,
    Examples,
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

TRAIN, MEASURE = "train", "measure"
OF_CLIENTS: tuple[str, ...] = ("num", "epoch", "acc", "loss")  # columns of metrics, as the paper calls them
EPS = 1e-4  # of Adam: with torch's 1e-8 the rounding errors of a slope that is 0 become steps of full length


@dataclass(frozen=True)
class Coefficients(HasOptions):
    """How much each metric counts: from the centre of the simplex a few steps of Adam towards where the loss of the
    mixed model on the server's rows is small (Eq. 11). Without rows or steps it is the centre.

    A step moves a coefficient's logarithm by `lr` at most, so that with 10 steps of 0.1 the largest of four is never
    above 0.71: figures tell a direction, not how much a metric matters. The minimum itself is a corner, nearly always.
    """

    group: ClassVar[str] = "learn"
    model: Model
    public: Examples | None = None  # else what clients shared, if they did
    steps: int = option(
        10, "Learn the coefficients of the client metrics by this many steps of Adam. 0 keeps them equal.", ge=0
    )
    lr: float = option(
        0.1,
        "Move the logarithm of a coefficient by at most this learning rate in one step of Adam.",
        gt=0,
        only_if=OnlyIf("learn.steps is above 0", lambda learn: learn.steps > 0),
    )

    def rows(self, state: ServerState) -> tuple[Tensor, Tensor]:
        return shared_rows(state, self.model) if self.public is None else (self.public.x, self.public.y)

    def learned(self, metrics: Floats, models: Tensor, like: Params, state: ServerState) -> Floats:
        """Of metrics [clients, columns] and the clients' models, a row each."""
        centre = torch.zeros(metrics.shape[1], device=self.model.device)
        x, y = self.rows(state)
        if not self.steps or not len(y):
            return np.full(metrics.shape[1], 1 / metrics.shape[1])
        corners, trainable = _corners(metrics, models, like), set(self.model.trainable)

        def loss(theta: Params) -> Tensor:
            """Of one model, the mean of the corners: sum over clients of ContriFunc_i W_i is a V with V = M' W."""
            a = theta["theta"].softmax(-1)
            still = a.detach()  # statistics of batch norm have no slopes
            mixed = {
                k: torch.tensordot(a if k in trainable else still, v, dims=1) if v.is_floating_point() else v
                for k, v in corners.items()
            }
            return F.cross_entropy(self.model.predict(mixed, x), y)

        theta, adam = {"theta": centre}, Adam(self.lr, eps=EPS)
        s, first = adam.init(theta), torch.inf
        for step in range(self.steps):
            slopes, value = grad_and_value(loss)(theta)
            first = float(value) if step == 0 else first
            theta, s = adam.update(theta, slopes, s)
        with torch.no_grad():
            better = float(loss(theta)) <= first  # false where it is no number
        return (theta["theta"] if better else centre).double().softmax(-1).cpu().numpy()


def _corners(metrics: Floats, models: Tensor, like: Params) -> Params:
    """For every metric the model that clients' models have in the mean by it alone: V = M' W, one product."""
    rows = torch.from_numpy(metrics.T.copy()).float() @ models
    found = [restored(row, like) for row in rows]
    return {k: torch.stack([m[k] for m in found]) if x.is_floating_point() else x for k, x in like.items()}


def _figures(stage: str, coefficients: Floats, names: Sequence[str] = OF_CLIENTS) -> dict[str, float]:
    return {f"{stage}.coefficient_{name}": float(a) for name, a in zip(names, coefficients, strict=True)}


def _counted(known: ClientTable) -> ClientTable:
    """Those of whom there is something to count: with rows, and with numbers that are numbers. Who diverged says
    nothing about the others."""
    if not len(known):
        return known
    finite = known["loss"].isfinite() & known["accuracy"].isfinite() & known["model"].isfinite().all(1)
    return known.filter(((known["size"] > 0) & finite).numpy())


@dataclass(frozen=True)
class ByContribution(ServerOnly):
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
        asked, trained = self._asked(state), set(ClientTable.load(state, TRAIN).clients)
        known, warm = _counted(self._known(state)), self.start == "warm"
        new = [c for c in state.roster if c not in asked | trained] if warm else []
        silent = sorted(c for c in asked - trained if c in set(state.roster)) if warm else []
        if warm:
            state = self._remembering(state, asked | set(new))
        if not len(known):
            return replace(state, cohort=tuple(new or silent))
        table = contribution.metrics(*(known[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
        a = self.coefficients.learned(table, known["model"], like, state)  # Eq. 11
        again = [silent[state.round % len(silent)]] if silent else []
        chosen = largest(table @ a, np.ones(len(known), dtype=bool), max(0, state.cohort_size - len(again)))
        cohort = tuple(sorted({*known.client_ids(chosen), *new, *again}))
        return replace(state, cohort=cohort, round_metrics={**state.round_metrics, **_figures(self.name, a)})

    def _asked(self, state: ServerState) -> set[ClientId]:
        return set(ClientTable.load(state, self.name).clients)

    def _remembering(self, state: ServerState, asked: set[ClientId]) -> ServerState:
        table = ClientTable.from_rows({c: {"asked": torch.tensor(True)} for c in asked})
        return replace(state, memory={**state.memory, self.name: table.to_tree()})

    def _with_first_models(self, state: ServerState) -> ServerState:
        """A cold client is represented by the model that it was measured with, which is kept."""
        if self.start == "warm":
            return state
        (model,) = state.models.values()
        kept, had = ClientTable.load(state, self.name), set(self._asked(state))
        told = ClientTable.load(state, MEASURE)
        new = {c: {"model": vector(model)} for c in told.clients if c not in had}
        return (
            replace(state, memory={**state.memory, self.name: kept.updated_with(ClientTable.from_rows(new)).to_tree()})
            if new
            else state
        )

    def _known(self, state: ServerState) -> ClientTable:
        """Of those who are there: rows, participations, accuracy, loss, model."""
        known, told = (
            t.filter(t.is_present(state.roster)) for t in (ClientTable.load(state, s) for s in (TRAIN, MEASURE))
        )
        new = told.filter(~told.is_present(known.clients))
        if self.start == "cold" and len(new):
            first = ClientTable.load(state, self.name)
            of = {"size": new["size"], "accuracy": new["accuracy"], "loss": new["loss_after"], "told": new["told"]}
            of |= {"count": torch.zeros(len(new)), "model": first.filter(first.is_present(new.clients))["model"]}
            known = known.updated_with(ClientTable(new.clients, of))
        if self.metrics == "last" or not len(known):
            return known
        later = torch.from_numpy(told.column("told", known.clients)) > known["told"]
        now = {"accuracy": told.column("accuracy", known.clients), "loss": told.column("loss_after", known.clients)}
        fresh = {k: torch.where(later, torch.from_numpy(v), known[k].double()) for k, v in now.items()}
        return ClientTable(known.clients, {**known.columns, **fresh})


@dataclass(frozen=True)
class FederateByContribution(Federate):
    """The cohort trains; each model becomes the mean of its members' results, weighed by their contribution (Eq. 12 and
    13), for which their models' directions may count too (Eq. 15), or by their rows alone. What everybody who ever took
    part told and sent last is kept."""

    coefficients: Coefficients | None = None
    by: Literal["size", "contribution", "cosine"] = "cosine"
    reuse: bool = False

    def plan(self, state: ServerState, seed: int) -> Plan:
        return replace(super().plan(state, seed), cache_models=self.reuse)

    def aggregate(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
        known = ClientTable.load(state, self.name).updated_with(self._told(state, reports))
        after = super().aggregate(state, reports)
        if self.by != "size":
            names = enumerate(sorted(state.models))
            weighed = {k: self._weighed(state, i, k, known, reports) or (after.models[k], {}) for i, k in names}
            figures = {k: v for _, told in weighed.values() for k, v in told.items()}
            models = {k: model for k, (model, _) in weighed.items()}
            after = replace(after, models=models, round_metrics={**after.round_metrics, **figures})
        return replace(after, memory={**after.memory, self.name: known.to_tree()})

    def _told(self, state: ServerState, reports: Mapping[ClientId, Report]) -> ClientTable:
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
                "model": vector(model),
                "told": torch.tensor(state.round),
            }

        return ClientTable.from_rows({c: row(c, r) for c, r in reports.items()})

    def _weighed(
        self, state: ServerState, place: int, name: str, known: ClientTable, reports: Mapping[ClientId, Report]
    ) -> tuple[Params, dict[str, float]] | None:
        """The model, and the coefficients; None where nobody can be compared, as when everybody diverged."""
        assert self.coefficients is not None
        before = state.models[name]
        inside = {c: r for c, r in with_rows(reports).items() if self._weight(state, place, c, r) > 0}
        told = _counted(known.filter(known.is_present(tuple(inside))))
        if not len(told):
            return None
        inside = {c: inside[c] for c in told.clients}
        columns, table = (
            OF_CLIENTS,
            contribution.metrics(*(told[k].double().numpy() for k in ("size", "count", "accuracy", "loss"))),
        )
        if self.by == "cosine":
            alike = self._alike(before, list(inside.values()))
            columns, table = (*columns, *alike), contribution.with_directions(table, list(alike.values()))
        a = self.coefficients.learned(table, told["model"], before, state)
        weights = dict(zip(told.clients, (table @ a).tolist(), strict=True))
        member = {c: self._weight(state, place, c, r) / r.counts["train"] for c, r in inside.items()}
        mean = tree.weighted_mean(  # Eq. 13
            [r.tensors["model"] for r in inside.values()], [weights[c] * member[c] for c in inside]
        )
        label = self.name if len(state.models) == 1 else f"{self.name} {name}"
        return mean, _figures(label, a, columns)

    def _alike(self, before: Params, reports: list[Report]) -> dict[str, Floats]:
        """How much base and head point where the global model's do, as trainable parameters in one row (Eq. 14). A
        network that is all head has no base."""
        assert self.coefficients is not None
        head, found = set(self.coefficients.model.head), {}
        parts = {"base": [k for k in self.trainable if k not in head], "head": [k for k in self.trainable if k in head]}
        for name, part in parts.items():
            if part:
                rows = [vector({k: r.tensors["model"][k] for k in part}).numpy() for r in reports]
                found[name] = contribution.cosines(np.stack(rows), vector({k: before[k] for k in part}).numpy())
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

    def at(self, round: int) -> float:
        return learning_rate(self.schedule, self.kappa, round, self.rounds, self.decay)


@dataclass(frozen=True)
class Update(OneProgram):
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
