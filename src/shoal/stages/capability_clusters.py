"""Overlapping clusters of models by their capability on each class of the shared samples (CLSM-FL)."""

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
    """Returns the capability of a model: the mean probability of the correct class, for each class.

    Probabilities are finer than the accuracy of a few samples. The values are scaled to a sum of 1, so that they
    compare the classes of one model and not the progress of several models. A class without samples has 0.
    """
    with torch.no_grad():
        correct_probabilities = F.softmax(model.predict(params, x), dim=-1).gather(1, y[:, None])[:, 0]
    totals = torch.zeros(model.num_classes, device=y.device).index_add(0, y, correct_probabilities)
    mean = totals / torch.bincount(y, minlength=model.num_classes).clamp(min=1)
    return (mean / mean.sum().clamp(min=1e-12)).cpu()


@dataclass(frozen=True)
class FuzzyRule(HasOptions):
    """Clusters models by fuzzy c-means.

    A Gaussian mixture would need variances, which cannot be estimated from a few clients in many dimensions.
    """

    group: ClassVar[str] = "cluster"
    num_clusters: int = option(3, "Form this many overlapping clusters of the received models by fuzzy c-means.", ge=1)
    fuzziness: float = option(
        2.0,
        "Set the exponent of fuzzy c-means. Near 1 a client belongs to one cluster, and large values make all "
        "memberships equal.",
        gt=1,
    )

    def __call__(self, rows: Floats, previous_centres: Floats | None, seed: int) -> tuple[Floats, Floats]:
        """Returns memberships and centres. A cluster keeps the number of its nearest previous centre."""
        from shoal.clusterers import FuzzyClusters

        clustering = FuzzyClusters(self.num_clusters, random_state=seed, fuzziness=self.fuzziness).fit(rows)
        order = (
            np.arange(self.num_clusters)
            if previous_centres is None
            else _match_centres(previous_centres, clustering.cluster_centers_)
        )
        return clustering.membership_[:, order], clustering.cluster_centers_[order]


def _match_centres(previous_centres: Floats, centres: Floats) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    return np.asarray(linear_sum_assignment(cdist(previous_centres, centres))[1], dtype=np.int64)


@dataclass(frozen=True)
class FormCapabilityClusters(ServerUpdate):
    """Clusters the received models by their capabilities and sets the memberships, before the models are averaged.

    Each client is represented by the last model that it sent. Memberships do not change until there are at least as
    many different capabilities as clusters. Until then no client has a membership, and all models are the same mean.
    A model moves only in proportion to the participation of its cluster. Otherwise clients with small memberships,
    which are never 0, would overwrite it. A client without samples is in no cluster.
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
        rows = {c: {"able": capability(self.model, r.tensors["model"], x, y)} for c, r in reports.items()}
        return self._with_clusters(state, ClientTable.from_rows(rows), seed)

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
        """Returns the memberships of fuzzy c-means, which are larger for nearer centres."""
        centres = state.memory[self.slot]["centres"].double().numpy()
        distances = np.maximum(np.linalg.norm(centres - representation, axis=1), 1e-12)
        shares = (distances.min() / distances) ** (2 / (self.rule.fuzziness - 1))
        return np.asarray(shares / shares.sum(), dtype=np.float64)

    def _with_clusters(self, state: ServerState, capabilities: ClientTable, seed: int) -> ServerState:
        memory = state.memory.get(self.slot, {})
        reported = ClientTable.from_tree(memory.get("known", {})).updated_with(capabilities)
        remembered = {**memory, "known": reported.to_tree()}
        rows = reported["able"].double().numpy()
        if len(np.unique(rows, axis=0)) >= self.rule.num_clusters:
            previous_centres = memory["centres"].numpy() if "centres" in memory else None
            weights, centres = self.rule(rows, previous_centres, seed)
            remembered["centres"] = torch.from_numpy(centres)
            membership = dict(zip(reported.clients, torch.from_numpy(weights).float(), strict=True))
        else:
            membership = _with_late_joining_clients(state.membership, capabilities.clients)
        return replace(state, membership=membership, memory={**state.memory, self.slot: remembered})


def _with_late_joining_clients(
    membership: Mapping[ClientId, Tensor], clients: Sequence[ClientId]
) -> dict[ClientId, Tensor]:
    """Returns memberships in which clients without one have the mean of all memberships."""
    return {**dict.fromkeys(clients, _mean_membership(membership)), **membership} if membership else {}


def _mean_membership(membership: Mapping[ClientId, Tensor]) -> Tensor:
    return torch.stack(list(membership.values())).mean(0)


def _move_models(
    state: ServerState, models: Mapping[str, Params], cohort: tuple[ClientId, ...]
) -> Mapping[str, Params]:
    """Returns models between those of `state` and the new `models`.

    A model becomes the new one if the mean membership of the cohort in its cluster is at least that of all clients.
    Otherwise it moves in proportion.
    """
    if not state.membership:
        return models
    mean_of_all = _mean_membership(state.membership)
    mean_of_cohort = torch.stack([state.membership[c] for c in cohort]).mean(0)
    steps = (mean_of_cohort / mean_of_all.clamp(min=1e-12)).clamp(max=1).tolist()
    return {
        k: tree.weighted_mean([state.models[k], models[k]], [1 - step, step])
        for k, step in zip(sorted(models), steps, strict=True)
    }


def blended_model(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the mean of all models, weighted by the memberships of the client, or of all clients if it has none."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        weights = state.membership[client]
    elif state.membership:
        weights = _mean_membership(state.membership)
    else:
        weights = torch.ones(len(names))
    return {"blend": tree.weighted_mean([state.models[k] for k in names], weights.tolist())}
