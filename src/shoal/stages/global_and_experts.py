"""One global model for all clients, and an expert for each cluster if there are clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.stages.balanced import REPRESENT_STAGE
from shoal.stages.personalise import Personalise
from shoal.stages.train import TrainAndAggregate
from shoal.types import ClientId, Params, Plan, Report, Schedule, ServerState, Task

GLOBAL, EXPERT = "global", "expert"


def global_and_own_expert(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the global model and, for a member of a cluster, the expert of its cluster."""
    models = {GLOBAL: state.models[GLOBAL]}
    if client is not None and client in state.membership:
        models[EXPERT] = state.models[sorted(state.models)[int(state.membership[client].argmax())]]
    return models


def global_and_all_experts(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the global model and, for a member of a cluster, all experts."""
    if client is None or client not in state.membership:
        return {GLOBAL: state.models[GLOBAL]}
    return state.models


@dataclass(frozen=True)
class AggregateGlobalAndExperts(TrainAndAggregate):
    """Averages all reports into the global model and the reports of members into the expert of their cluster.

    With `classwise_head` each class's row of the last layer is weighted by the number of samples of that class that a
    client has, because a client without samples of a class learns little about it. A class that no client of the round
    has is averaged like all other parameters.
    """

    classwise_head: tuple[str, ...] = ()
    source: str = REPRESENT_STAGE

    def _reported_params(self, name: str, report: Report) -> Params:
        return report.tensors["model" if name == GLOBAL else EXPERT]

    def _client_weight(self, state: ServerState, model_index: int, client: ClientId, report: Report) -> float:
        weight = float(report.counts["train"] if self.weighting == "size" else 1)
        if sorted(state.models)[model_index] == GLOBAL:
            return weight
        return weight * float(state.membership[client][model_index]) if client in state.membership else 0.0

    def _weighted_mean(self, state: ServerState, parts: Mapping[ClientId, tuple[float, Params]]) -> Params:
        mean, reported = super()._weighted_mean(state, parts), ClientTable.load(state, self.source)
        if not self.classwise_head or not len(reported):
            return mean
        weights = _weights_by_class(reported, parts)  # [clients, classes]
        total = weights.sum(0)
        by_class = {k: torch.stack([model[k] for _, model in parts.values()]) for k in self.classwise_head}
        return mean | {
            k: _weighted_rows(x, weights, total, mean[k]) for k, x in by_class.items() if x.shape[1] == len(total)
        }


def _weights_by_class(reported: ClientTable, parts: Mapping[ClientId, tuple[float, Params]]) -> Tensor:
    """Returns the weights [clients, classes]. A client without a label report counts equally for all classes."""
    labels_by_client = dict(zip(reported.clients, reported["labels"].double(), strict=True))
    equal_labels = torch.full_like(reported["labels"][0], 1 / reported["labels"].shape[1]).double()
    return torch.stack([weight * labels_by_client.get(c, equal_labels) for c, (weight, _) in parts.items()])


def _weighted_rows(heads: Tensor, weights: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    """Returns the mean of heads [clients, classes, ...] by weights [clients, classes], or `mean` without weights."""
    fractions = (weights / total.clamp(min=1e-12)).to(heads)
    rows = torch.einsum("nc...,nc->c...", heads, fractions)
    has_weight = (total > 0).to(heads.device).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(has_weight, rows, mean)


@dataclass(frozen=True)
class PersonaliseMembers(Personalise):
    """Personalises only members of clusters, because other clients have a single model and no experts to combine."""

    @property
    def schedule(self) -> Schedule:
        return replace(super().schedule, clients="members")

    def plan(self, state: ServerState, seed: int) -> Plan:
        members = [c for c in state.roster if c in state.membership]
        if not members:
            return Plan()
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in members})
