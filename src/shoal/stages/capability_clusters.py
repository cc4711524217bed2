"""Soft clusters of models by what they can do: how well each does on every class of the server's rows (CLSM-FL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shoal import tree
from shoal.client_table import ClientTable
from shoal.models import Model
from shoal.stages.base import CLUSTERING_LIBRARIES, with_samples
from shoal.stages.cluster import Floats
from shoal.stages.prediction_similarity import shared_samples
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.stages.vectors import UNBOUNDED
from shoal.types import ClientId, HasOptions, Params, Report, ServerState, option


def capability(model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Of each class the mean probability that its rows are given for it: accuracy, in finer steps than few rows allow.
    Scaled to a sum of 1, for what a model is good at, not for how good it has become; 0 for classes without rows."""
    with torch.no_grad():
        right = F.softmax(model.predict(params, x), dim=-1).gather(1, y[:, None])[:, 0]
    hits = torch.zeros(model.num_classes, device=y.device).index_add(0, y, right)
    mean = hits / torch.bincount(y, minlength=model.num_classes).clamp(min=1)
    return (mean / mean.sum().clamp(min=1e-12)).cpu()


@dataclass(frozen=True)
class FuzzyRule(HasOptions):
    """Fuzzy c-means. A Gaussian mixture would need variances, which a few clients in many classes cannot tell."""

    group: ClassVar[str] = "cluster"
    num_clusters: int = option(3, "Form this many overlapping clusters of the received models by fuzzy c-means.", ge=1)
    fuzziness: float = option(
        2.0,
        "Set the exponent of fuzzy c-means. Near 1 a client belongs to one cluster, and large values make all "
        "memberships equal.",
        gt=1,
    )

    def __call__(self, rows: Floats, previous_centres: Floats | None, seed: int) -> tuple[Floats, Floats]:
        """Memberships and centres; a cluster keeps its number from `before`, the centres of the last time."""
        from shoal.clusterers import FuzzyClusters

        found = FuzzyClusters(self.num_clusters, random_state=seed, fuzziness=self.fuzziness).fit(rows)
        order = (
            np.arange(self.num_clusters)
            if previous_centres is None
            else _match_centres(previous_centres, found.cluster_centers_)
        )
        return found.membership_[:, order], found.cluster_centers_[order]


def _match_centres(previous_centres: Floats, centres: Floats) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    return np.asarray(linear_sum_assignment(cdist(previous_centres, centres))[1], dtype=np.int64)


@dataclass(frozen=True)
class FormCapabilityClusters(ServerUpdate):
    """Clusters the received models by what they can do, before they are averaged. Memberships follow from it.

    A client is known by the last model that it sent. While fewer different ones are known than there are clusters,
    memberships stay as they are: at first nobody has any, and all models are the same mean. A model moves only as far
    as its cluster took part: outsiders alone would otherwise overwrite it, for their memberships in it are small but
    never 0. Who has no rows belongs nowhere.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: FuzzyRule
    model: Model
    slot: str = "train"

    def before_aggregation(
        self, train: TrainAndAggregate, state: ServerState, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        (x, y), reports = shared_samples(state, self.model), with_samples(reports)
        if not len(x) or not reports:
            return state
        able = {c: {"able": capability(self.model, r.tensors["model"], x, y)} for c, r in reports.items()}
        return self._with_clusters(state, ClientTable.from_rows(able), seed)

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        cohort = tuple(with_samples(reports))
        if not cohort or not len(shared_samples(before, self.model)[0]):
            return after
        return replace(after, models=_move_models(before, after.models, cohort))

    @property
    def representation_bounds(self) -> tuple[float, float]:
        return UNBOUNDED

    def representation_width(self, state: ServerState) -> int | None:
        centres = state.memory.get(self.slot, {}).get("centres")
        return None if centres is None else int(centres.shape[1])

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        """Fuzzy c-means: a share of each cluster, the larger the nearer its centre."""
        centres = state.memory[self.slot]["centres"].double().numpy()
        distances = np.maximum(np.linalg.norm(centres - representation, axis=1), 1e-12)
        shares = (distances.min() / distances) ** (2 / (self.rule.fuzziness - 1))
        return np.asarray(shares / shares.sum(), dtype=np.float64)

    def _with_clusters(self, state: ServerState, capabilities: ClientTable, seed: int) -> ServerState:
        memory = state.memory.get(self.slot, {})
        known = ClientTable.from_tree(memory.get("known", {})).updated_with(capabilities)
        kept = {**memory, "known": known.to_tree()}
        rows = known["able"].double().numpy()
        if len(np.unique(rows, axis=0)) >= self.rule.num_clusters:
            before = memory["centres"].numpy() if "centres" in memory else None
            member, centres = self.rule(rows, before, seed)
            kept["centres"] = torch.from_numpy(centres)
            found = dict(zip(known.clients, torch.from_numpy(member).float(), strict=True))
        else:
            found = _with_late_joining_clients(state.membership, capabilities.clients)
        return replace(state, membership=found, memory={**state.memory, self.slot: kept})


def _with_late_joining_clients(
    membership: Mapping[ClientId, Tensor], clients: Sequence[ClientId]
) -> dict[ClientId, Tensor]:
    """Until they are clustered, clients without memberships belong like the average of those who have some."""
    return {**dict.fromkeys(clients, _mean_membership(membership)), **membership} if membership else {}


def _mean_membership(membership: Mapping[ClientId, Tensor]) -> Tensor:
    return torch.stack(list(membership.values())).mean(0)


def _move_models(
    state: ServerState, models: Mapping[str, Params], cohort: tuple[ClientId, ...]
) -> Mapping[str, Params]:
    """From the models of `state` towards `models`: all the way where the cohort belongs to a cluster no less than
    clients do on average, else in proportion."""
    if not state.membership:
        return models
    usual = _mean_membership(state.membership)
    present = torch.stack([state.membership[c] for c in cohort]).mean(0)
    steps = (present / usual.clamp(min=1e-12)).clamp(max=1).tolist()
    return {
        k: tree.weighted_mean([state.models[k], models[k]], [1 - step, step])
        for k, step in zip(sorted(models), steps, strict=True)
    }


def blended_model(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The mean of all models, weighted by a client's memberships; for a client without any, by those of all."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        weights = state.membership[client]
    elif state.membership:
        weights = _mean_membership(state.membership)
    else:
        weights = torch.ones(len(names))
    return {"blend": tree.weighted_mean([state.models[k] for k in names], weights.tolist())}
