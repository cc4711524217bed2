"""One model for all, and beside it experts for groups of clients, if there are any."""

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
    """The global model; to members of a group its expert too."""
    models = {GLOBAL: state.models[GLOBAL]}
    if client is not None and client in state.membership:
        models[EXPERT] = state.models[sorted(state.models)[int(state.membership[client].argmax())]]
    return models


def global_and_all_experts(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """The global model; to members of groups all experts too."""
    if client is None or client not in state.membership:
        return {GLOBAL: state.models[GLOBAL]}
    return state.models


@dataclass(frozen=True)
class AggregateGlobalAndExperts(TrainAndAggregate):
    """Everybody counts in the global model, members in their expert. With `head` each class's row of the last layer
    is weighed by how many rows of that class a client has: who does not hold a class has little to say about it. A
    class that nobody in the round holds is averaged like everything else."""

    classwise_head: tuple[str, ...] = ()
    source: str = REPRESENT_STAGE

    def _reported_params(self, name: str, report: Report) -> Params:
        return report.tensors["model" if name == GLOBAL else EXPERT]

    def _client_weight(self, state: ServerState, model_index: int, client: ClientId, report: Report) -> float:
        rows = float(report.counts["train"] if self.weighting == "size" else 1)
        if sorted(state.models)[model_index] == GLOBAL:
            return rows
        return rows * float(state.membership[client][model_index]) if client in state.membership else 0.0

    def _weighted_mean(self, state: ServerState, parts: Mapping[ClientId, tuple[float, Params]]) -> Params:
        mean, known = super()._weighted_mean(state, parts), ClientTable.load(state, self.source)
        if not self.classwise_head or not len(known):
            return mean
        weights = _weights_by_class(known, parts)  # [clients, classes]
        total = weights.sum(0)
        by_class = {k: torch.stack([model[k] for _, model in parts.values()]) for k in self.classwise_head}
        return mean | {
            k: _weighted_rows(x, weights, total, mean[k]) for k, x in by_class.items() if x.shape[1] == len(total)
        }


def _weights_by_class(known: ClientTable, parts: Mapping[ClientId, tuple[float, Params]]) -> Tensor:
    """Who has told nothing is taken to hold all classes alike."""
    labels_by_client = dict(zip(known.clients, known["labels"].double(), strict=True))
    equal_labels = torch.full_like(known["labels"][0], 1 / known["labels"].shape[1]).double()
    return torch.stack([weight * labels_by_client.get(c, equal_labels) for c, (weight, _) in parts.items()])


def _weighted_rows(heads: Tensor, weights: Tensor, total: Tensor, mean: Tensor) -> Tensor:
    """Of heads [clients, classes, ...], weighed [clients, classes]; the mean where nobody weighs anything."""
    share = (weights / total.clamp(min=1e-12)).to(heads)
    rows = torch.einsum("nc...,nc->c...", heads, share)
    has_weight = (total > 0).to(heads.device).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(has_weight, rows, mean)


@dataclass(frozen=True)
class PersonaliseMembers(Personalise):
    """Only members of groups have something to weigh: without groups nobody is asked."""

    @property
    def schedule(self) -> Schedule:
        return replace(super().schedule, clients="members")

    def plan(self, state: ServerState, seed: int) -> Plan:
        members = [c for c in state.roster if c in state.membership]
        if not members:
            return Plan()
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in members})
