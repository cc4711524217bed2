"""What members of clusters tell for the sake of those who never train, and what these are sent (paper 004)."""

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
    """Members of clusters tell once where their rows lie among the features of the first round's mean; what they tell
    is added up, cluster by cluster."""

    program: ClientProgram
    name: str = MOMENTS_STAGE
    schedule: ClassVar[Schedule] = Schedule("new-members")

    def plan(self, state: ServerState, seed: int) -> Plan:
        told = set(self._reported_clients(state))
        asked = [c for c in state.roster if c in state.membership and c not in told]
        sent = {EXTRACTOR: state.memory[EXTRACTOR]} if asked else {}
        return Plan(self.program, {c: Task(sent, {}, derive_seed(seed, c)) for c in asked})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if not reports:
            return state
        kept = state.memory.get(self.name, {}).get("moments", {})
        for client, report in sorted(reports.items()):
            kept = _add_moments(kept, report.tensors["moments"], state.membership[client])
        told = ClientTable((*self._reported_clients(state), *sorted(reports)), {})
        return replace(state, memory={**state.memory, self.name: {"moments": kept, "told": told.to_tree()}})

    def _reported_clients(self, state: ServerState) -> tuple[ClientId, ...]:
        return ClientTable.from_tree(state.memory.get(self.name, {}).get("told", {})).clients


def _add_moments(moments: Tree, reported: Params, membership: Tensor) -> Tree:
    """Counts add up; means over rows are those of both. [models, ...]"""
    empty = {k: torch.zeros(len(membership), *x.shape) for k, x in reported.items()}
    before = moments or empty
    cluster, rows = int(membership.argmax()), float(reported["count"].sum())
    share = rows / max(1.0, float(before["count"][cluster].sum()) + rows)
    after = {k: x.clone() for k, x in before.items()}
    after["count"][cluster] += reported["count"].cpu()
    for k in ("mean", "square"):
        after[k][cluster] = torch.lerp(before[k][cluster], reported[k].cpu(), share)
    return after


def confident_models(model: Model, confidence: Confidence, label_stage: str = LABEL_STAGE) -> ModelsFor:
    """A client's own cluster's model, by its name; to whoever is in no cluster, such as an unseen client, all of them,
    and what helps to choose among them."""

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
    """Which classes somebody in each cluster holds, [models, classes]; empty where that is not asked for."""
    if confidence.mask == "none":
        return {}
    known = ClientTable.load(state, CLUSTER_STAGE if confidence.mask == "read" else label_stage)
    known = known.filter(known.is_present(tuple(state.membership))) if len(known) else known
    column = "risen" if confidence.mask == "read" else "labels"
    has_class = torch.zeros(len(state.models), known[column].shape[1] if len(known) else 0, dtype=torch.bool)
    for client, row in zip(known.clients, known.columns.get(column, ()), strict=True):
        has_class[int(state.membership[client].argmax())] |= row > 0
    return {"mask": has_class} if len(known) and bool(has_class.any(1).all()) else {}


def _to_device(device: str, models: Mapping[str, Params]) -> dict[str, Params]:
    return {name: {k: x.to(device) for k, x in model.items()} for name, model in models.items()}
