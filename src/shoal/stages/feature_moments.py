"""Feature moments of the clusters, and the models that an unseen client combines (Freitas et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.client.confidence import EXTRACTOR, ROUTER, Confidence, fit_discriminant
from shoal.client_table import ClientTable
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.stages.first_round_clusters import CLUSTER_STAGE
from shoal.types import ClientId, ClientProgram, ModelsFor, Params, Plan, Report, Schedule, ServerState, Task, Tree

MOMENTS_STAGE, LABEL_STAGE = "describe", "labels"


@dataclass(frozen=True)
class CollectFeatureMoments(OneProgram):
    """Collects once, from every member of a cluster, the moments of its samples' features, and adds them up by cluster.

    The features come from the mean model of the first round.
    """

    program: ClientProgram
    name: str = MOMENTS_STAGE
    schedule: ClassVar[Schedule] = Schedule("new-members")

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported_clients = set(self._reported_clients(state))
        new_members = [c for c in state.roster if c in state.membership and c not in reported_clients]
        sent = {EXTRACTOR: state.memory[EXTRACTOR]} if new_members else {}
        return Plan(self.program, {c: Task(sent, {}, derive_seed(seed, c)) for c in new_members})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        moments = state.memory.get(self.name, {}).get("moments", {})
        for client, report in sorted(reports.items()):
            moments = _add_moments(moments, report.tensors["moments"], state.membership[client])
        reported = ClientTable((*self._reported_clients(state), *sorted(reports)), {})
        return replace(state, memory={**state.memory, self.name: {"moments": moments, "told": reported.to_tree()}})

    def _reported_clients(self, state: ServerState) -> tuple[ClientId, ...]:
        return ClientTable.from_tree(state.memory.get(self.name, {}).get("told", {})).clients


def _add_moments(moments: Tree, reported: Params, membership: Tensor) -> Tree:
    """Returns the moments [models, ...] of all samples. Counts are added, and means are combined by their counts."""
    empty = {k: torch.zeros(len(membership), *x.shape) for k, x in reported.items()}
    before = moments or empty
    cluster, num_samples = int(membership.argmax()), float(reported["count"].sum())
    fraction = num_samples / max(1.0, float(before["count"][cluster].sum()) + num_samples)
    after = {k: x.clone() for k, x in before.items()}
    after["count"][cluster] += reported["count"].cpu()
    for k in ("mean", "square"):
        after[k][cluster] = torch.lerp(before[k][cluster], reported[k].cpu(), fraction)
    return after


def confident_models(model: Model, confidence: Confidence, label_stage: str = LABEL_STAGE) -> ModelsFor:
    """Returns a function that gives a member of a cluster the model of its cluster.

    A client without a cluster, such as an unseen client, gets all models and the parameters of the confidence rule.
    """

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        if client is not None and client in state.membership:
            name = sorted(state.models)[int(state.membership[client].argmax())]
            return {name: state.models[name]}
        if len(state.models) == 1:
            return state.models
        router, extractor = _class_mask(state, confidence, label_stage), {}
        moments = state.memory.get(MOMENTS_STAGE, {}).get("moments", {})
        if confidence.rule == "density" and moments and bool((moments["count"].sum(1) > 0).all()):
            router |= fit_discriminant(moments, confidence.covariance_shrinkage, confidence.ridge)
            extractor = {EXTRACTOR: state.memory[EXTRACTOR]}
        return {**state.models, **_to_device(model.device, extractor | ({ROUTER: router} if router else {}))}

    return models_for


def _class_mask(state: ServerState, confidence: Confidence, label_stage: str) -> Params:
    """Returns which classes occur in each cluster [models, classes], or nothing if the mask is off or incomplete."""
    if confidence.mask == "none":
        return {}
    reported = ClientTable.load(state, CLUSTER_STAGE if confidence.mask == "inferred" else label_stage)
    reported = reported.filter(reported.is_present(tuple(state.membership))) if len(reported) else reported
    column = "risen" if confidence.mask == "inferred" else "labels"
    has_class = torch.zeros(len(state.models), reported[column].shape[1] if len(reported) else 0, dtype=torch.bool)
    for client, row in zip(reported.clients, reported.columns.get(column, ()), strict=True):
        has_class[int(state.membership[client].argmax())] |= row > 0
    return {"mask": has_class} if len(reported) and bool(has_class.any(1).all()) else {}


def _to_device(device: str, models: Mapping[str, Params]) -> dict[str, Params]:
    return {name: {k: x.to(device) for k, x in model.items()} for name, model in models.items()}
