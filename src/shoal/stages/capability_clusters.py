"""Soft clusters of models by what they can do: how well each does on every class of the server's rows (CLSM-FL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shoal import tree
from shoal.client_table import Table
from shoal.errors import UserError
from shoal.models import Model
from shoal.stages.base import with_rows
from shoal.stages.cluster import Floats
from shoal.stages.prediction_similarity import shared_rows
from shoal.stages.train import AroundTraining, Federate
from shoal.types import ClientId, Params, Report, ServerState


def capability(model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Of each class the mean probability that its rows are given for it: accuracy, in finer steps than few rows allow.
    Scaled to a sum of 1, for what a model is good at, not for how good it has become; 0 for classes without rows."""
    with torch.no_grad():
        right = F.softmax(model.predict(params, x), dim=-1).gather(1, y[:, None])[:, 0]
    hits = torch.zeros(model.classes, device=y.device).index_add(0, y, right)
    mean = hits / torch.bincount(y, minlength=model.classes).clamp(min=1)
    return (mean / mean.sum().clamp(min=1e-12)).cpu()


@dataclass(frozen=True)
class Soft:
    """Fuzzy c-means. A Gaussian mixture would need variances, which a few clients in many classes cannot tell."""

    groups: int = 3
    fuzziness: float = 2.0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UserError(f"cluster.groups is {self.groups}; it must be 1 or more")
        if self.fuzziness <= 1:
            raise UserError(f"cluster.fuzziness is {self.fuzziness}; it must be above 1")

    def __call__(self, rows: Floats, before: Floats | None, seed: int) -> tuple[Floats, Floats]:
        """Memberships and centres; a cluster keeps its number from `before`, the centres of the last time."""
        from shoal.clusterers import FuzzyClusters

        found = FuzzyClusters(self.groups, random_state=seed, fuzziness=self.fuzziness).fit(rows)
        order = np.arange(self.groups) if before is None else _matched(before, found.cluster_centers_)
        return found.membership_[:, order], found.cluster_centers_[order]


def _matched(before: Floats, centres: Floats) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    return np.asarray(linear_sum_assignment(cdist(before, centres))[1], dtype=np.int64)


@dataclass(frozen=True)
class Semantic(AroundTraining):
    """Trains as `train` does; before that averages, the models received are clustered by what they can do, and
    memberships follow from it.

    A client is known by the last model that it sent. While fewer different ones are known than there are clusters,
    memberships stay as they are: at first nobody has any, and all models are the same mean. A model moves only as far
    as its cluster took part: outsiders alone would otherwise overwrite it, for their memberships in it are small but
    never 0. Who has no rows belongs nowhere.
    """

    train: Federate
    rule: Soft
    model: Model

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        x, y = shared_rows(state, self.model)
        reports = with_rows(reports)
        if not len(x) or not reports:
            return self.train.fold(state, reports, seed)
        able = {c: {"able": capability(self.model, r.tensors["model"], x, y)} for c, r in reports.items()}
        state = self._clustered(state, Table.of(able), seed)
        after = self.train.fold(state, reports, seed)
        return replace(after, models=_moved(state, after.models, tuple(reports)))

    def _clustered(self, state: ServerState, able: Table, seed: int) -> ServerState:
        memory = state.memory.get(self.name, {})
        known = Table.read(memory.get("known", {})).merged(able)
        kept = {**memory, "known": known.tree()}
        rows = known["able"].double().numpy()
        if len(np.unique(rows, axis=0)) >= self.rule.groups:
            before = memory["centres"].numpy() if "centres" in memory else None
            member, centres = self.rule(rows, before, seed)
            kept["centres"] = torch.from_numpy(centres)
            found = dict(zip(known.clients, torch.from_numpy(member).float(), strict=True))
        else:
            found = _with_newcomers(state.membership, able.clients)
        return replace(state, membership=found, memory={**state.memory, self.name: kept})


def _with_newcomers(membership: Mapping[ClientId, Tensor], clients: Sequence[ClientId]) -> dict[ClientId, Tensor]:
    """Until they are clustered, clients without memberships belong like the average of those who have some."""
    return {**dict.fromkeys(clients, _usual(membership)), **membership} if membership else {}


def _usual(membership: Mapping[ClientId, Tensor]) -> Tensor:
    return torch.stack(list(membership.values())).mean(0)


def _moved(state: ServerState, models: Mapping[str, Params], cohort: tuple[ClientId, ...]) -> Mapping[str, Params]:
    """From the models of `state` towards `models`: all the way where the cohort belongs to a cluster no less than
    clients do on average, else in proportion."""
    if not state.membership:
        return models
    usual = _usual(state.membership)
    present = torch.stack([state.membership[c] for c in cohort]).mean(0)
    steps = (present / usual.clamp(min=1e-12)).clamp(max=1).tolist()
    return {
        k: tree.weighted_mean([state.models[k], models[k]], [1 - step, step])
        for k, step in zip(sorted(models), steps, strict=True)
    }


def blend_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The mean of all models, weighted by a client's memberships; for a client without any, by those of all."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        weights = state.membership[client]
    elif state.membership:
        weights = _usual(state.membership)
    else:
        weights = torch.ones(len(names))
    return {"blend": tree.weighted_mean([state.models[k] for k in names], weights.tolist())}
