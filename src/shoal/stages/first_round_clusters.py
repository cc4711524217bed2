"""Clusters that are formed once, from the models that return from the first round (Freitas et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal import tree
from shoal.client.confidence import EXTRACTOR
from shoal.client_table import ClientTable
from shoal.models import Model
from shoal.stages.base import CLUSTERING_LIBRARIES, with_samples
from shoal.stages.cluster import Clustering, Floats
from shoal.stages.experts import (
    WITHOUT_SAMPLES_SLOT,
    assign_clients,
    expert_for,
    named_experts,
    remember_without_samples,
)
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.stages.vectors import flatten_params
from shoal.types import ClientId, ModelsFor, Params, Plan, Report, ServerState

CLUSTER_STAGE, FIRST_MODEL_SLOT = "cluster", "first"


@dataclass(frozen=True)
class FormFirstRoundClusters(ServerUpdate):
    """Forms clusters from the last layers of the models that return from the first round (Alg. 2, 4-15).

    A late-joining client trains the first model once, at the learning rate of the first round, and joins the cluster
    whose members have the nearest last layers. Its model is averaged into no expert, because it started from the first
    weights. The metrics of a round are the number of models sent to the server (Eq. 4) and the number of clusters, and
    in the first round the number of clients in no dense cluster.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: Callable[[Floats, int], Clustering]  # (the last layer of each client, seed)
    model: Model

    def adjust_plan(self, train: TrainAndAggregate, state: ServerState, plan: Plan) -> Plan:
        first = train.rate.at(0)
        tasks = {
            c: task if c in state.membership else replace(task, config={**task.config, "lr": first})
            for c, task in plan.tasks.items()
        }
        return replace(plan, tasks=tasks)

    def before_aggregation(
        self, train: TrainAndAggregate, state: ServerState, reports: Mapping[ClientId, Report], seed: int
    ) -> ServerState:
        trained, state = with_samples(reports), remember_without_samples(state, WITHOUT_SAMPLES_SLOT, reports)
        last_layers = {c: self._last_layer(r.tensors["model"]) for c, r in trained.items()}
        finite_layers = self._finite_layers(last_layers)
        if (
            not state.membership and trained and len(finite_layers) == len(trained)
        ):  # otherwise the engine detects the divergence
            return self._with_clusters(state, ClientTable.from_rows(last_layers), seed)
        return state

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        last_layers = {c: self._last_layer(r.tensors["model"]) for c, r in with_samples(reports).items()}
        late_layers = ClientTable.from_rows(
            {c: row for c, row in self._finite_layers(last_layers).items() if c not in before.membership}
        )
        if before.membership and len(late_layers):
            after = self._with_late_joining_clients(after, late_layers)
        new_metrics = {
            f"{train.name}.updates": float(len(reports)),
            f"{CLUSTER_STAGE}.num_clusters": float(len(after.models)),
        }
        return replace(after, round_metrics={**after.round_metrics, **new_metrics})

    def _finite_layers(self, last: Mapping[ClientId, dict[str, Tensor]]) -> dict[ClientId, dict[str, Tensor]]:
        return {c: row for c, row in last.items() if bool(row["last"].isfinite().all())}

    def _last_layer(self, model: Params) -> dict[str, Tensor]:
        return {"last": flatten_params({k: model[k] for k in self.model.head})}

    def _with_clusters(self, state: ServerState, reported: ClientTable, seed: int) -> ServerState:
        clustering, first = self.rule(reported["last"].double().numpy(), seed), next(iter(state.models.values()))
        columns = {**reported.columns, **self._raised_biases(reported, first)}
        memory = {**state.memory, CLUSTER_STAGE: ClientTable(reported.clients, columns).to_tree()}
        new_metrics = {**state.round_metrics, f"{CLUSTER_STAGE}.noise": float(clustering.num_noise_clients)}
        models = named_experts([first] * (int(clustering.labels.max()) + 1))
        return assign_clients(
            replace(state, models=models, memory=memory, round_metrics=new_metrics), reported.clients, clustering.labels
        )

    def _raised_biases(self, reported: ClientTable, first: Params) -> dict[str, Tensor]:
        """Returns for which classes the bias of each client rose, or nothing if the last layer has no bias.

        Cross-entropy raises the bias only of classes that a client has and that are more frequent than the model
        predicted.
        """
        change = reported["last"] - self._last_layer(first)["last"]
        is_bias = torch.cat([torch.full((first[k].numel(),), first[k].dim() == 1) for k in sorted(self.model.head)])
        return {"risen": change[:, is_bias] > 0} if bool(is_bias.any()) else {}

    def _with_late_joining_clients(self, state: ServerState, late_layers: ClientTable) -> ServerState:
        from shoal.clusterers.neighbours import nearest_clusters

        members = ClientTable.load(state, CLUSTER_STAGE)
        clusters = np.array([state.cluster_of(c) for c in members.clients], dtype=np.int64)
        labels = nearest_clusters(members["last"].double().numpy(), clusters, late_layers["last"].double().numpy())
        return assign_clients(state, late_layers.clients, labels)


@dataclass(frozen=True)
class KeepFirstMean(ServerUpdate):
    """Keeps the mean of the models that returned from the round in which clusters were formed (Alg. 2, line 8)."""

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        if not before.membership or EXTRACTOR in before.memory:
            return after
        trained = sorted(with_samples(reports).items())
        models, sizes = [r.tensors["model"] for _, r in trained], [r.counts["train"] for _, r in trained]
        mean = tree.to_device(tree.weighted_mean(models, sizes), "cpu")
        return replace(after, memory={**after.memory, EXTRACTOR: mean})


def cluster_or_first_model(model: Model) -> ModelsFor:
    """Returns a function that gives a client the model of its cluster, or the first model until it has a cluster."""

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        if state.membership and client not in state.membership:
            return {"expert": model.init(int(state.memory[FIRST_MODEL_SLOT]["seed"]))}
        return expert_for(state, client)

    return models_for
