"""Clusters found once, of the models that return from the first round, and their members in turn (paper 004)."""

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
from shoal.stages.base import CLUSTERING, with_rows
from shoal.stages.cluster import Clustering, Floats
from shoal.stages.experts import IDLE, expert_for, joined, noted, numbered
from shoal.stages.train import Federate, ServerUpdate
from shoal.stages.vectors import vector
from shoal.types import ClientId, ModelsFor, Params, Plan, Report, ServerState

GROUPS, FIRST = "cluster", "first"


@dataclass(frozen=True)
class FormFirstRoundClusters(ServerUpdate):
    """Clusters what returns from the first round by its last layers (Alg. 2, 4-15).

    Whoever comes later trains the first model once, at the rate of the first round, and joins the cluster to whose
    members' last layers its own is nearest; a model that sets out from the first weights is averaged into none. Tells
    how many models were sent to the server (Eq. 4), how many clusters there are, and of the first round how many
    clients were in no dense group.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING

    rule: Callable[[Floats, int], Clustering]  # (the last layer of each client, seed)
    model: Model

    def adjust_plan(self, train: Federate, state: ServerState, plan: Plan) -> Plan:
        first = train.rate.at(0)
        tasks = {
            c: task if c in state.membership else replace(task, config={**task.config, "lr": first})
            for c, task in plan.tasks.items()
        }
        return replace(plan, tasks=tasks)

    def before(self, train: Federate, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        told, state = with_rows(reports), noted(state, IDLE, reports)
        last = {c: self._last(r.tensors["model"]) for c, r in told.items()}
        sound = self._finite(last)
        if not state.membership and told and len(sound) == len(told):  # else the loop sees the divergence
            return self._clustered(state, ClientTable.from_rows(last), seed)
        return state

    def after(
        self, train: Federate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        last = {c: self._last(r.tensors["model"]) for c, r in with_rows(reports).items()}
        newcomers = ClientTable.from_rows(
            {c: row for c, row in self._finite(last).items() if c not in before.membership}
        )
        if before.membership and len(newcomers):
            after = self._joined(after, newcomers)
        figures = {f"{train.name}.updates": float(len(reports)), f"{GROUPS}.groups": float(len(after.models))}
        return replace(after, round_metrics={**after.round_metrics, **figures})

    def _finite(self, last: Mapping[ClientId, dict[str, Tensor]]) -> dict[ClientId, dict[str, Tensor]]:
        return {c: row for c, row in last.items() if bool(row["last"].isfinite().all())}

    def _last(self, model: Params) -> dict[str, Tensor]:
        return {"last": vector({k: model[k] for k in self.model.head})}

    def _clustered(self, state: ServerState, told: ClientTable, seed: int) -> ServerState:
        found, first = self.rule(told["last"].double().numpy(), seed), next(iter(state.models.values()))
        kept = {**told.columns, **self._risen(told, first)}
        memory = {**state.memory, GROUPS: ClientTable(told.clients, kept).to_tree()}
        figures = {**state.round_metrics, f"{GROUPS}.noise": float(found.noise)}
        models = numbered([first] * (int(found.labels.max()) + 1))
        return joined(replace(state, models=models, memory=memory, round_metrics=figures), told.clients, found.labels)

    def _risen(self, told: ClientTable, first: Params) -> dict[str, Tensor]:
        """Whose bias rose for which class: cross-entropy raises it only for classes that a client holds, and for those
        of which it has more than the model expected. Without biases in the last layer nothing can be read."""
        change = told["last"] - self._last(first)["last"]
        places = torch.cat([torch.full((first[k].numel(),), first[k].dim() == 1) for k in sorted(self.model.head)])
        return {"risen": change[:, places] > 0} if bool(places.any()) else {}

    def _joined(self, state: ServerState, newcomers: ClientTable) -> ServerState:
        from shoal.clusterers.neighbours import nearest_clusters

        known = ClientTable.load(state, GROUPS)
        groups = np.array([state.cluster_of(c) for c in known.clients], dtype=np.int64)
        labels = nearest_clusters(known["last"].double().numpy(), groups, newcomers["last"].double().numpy())
        return joined(state, newcomers.clients, labels)


@dataclass(frozen=True)
class KeepFirstMean(ServerUpdate):
    """Keeps the mean of the models that returned from the round in which clusters were formed (Alg. 2, line 8)."""

    def after(
        self, train: Federate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        if not before.membership or EXTRACTOR in before.memory:
            return after
        trained = sorted(with_rows(reports).items())
        models, sizes = [r.tensors["model"] for _, r in trained], [r.counts["train"] for _, r in trained]
        mean = tree.to_device(tree.weighted_mean(models, sizes), "cpu")
        return replace(after, memory={**after.memory, EXTRACTOR: mean})


def trained_by(model: Model) -> ModelsFor:
    """What a client trains: its cluster's model, or the first one, by which it is told where it belongs."""

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        if state.membership and client not in state.membership:
            return {"expert": model.init(int(state.memory[FIRST]["seed"]))}
        return expert_for(state, client)

    return models_for
