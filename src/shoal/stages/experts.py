"""Gives every cluster a model of its own, an expert, and decides what happens to experts when clusters change.

The rules that form clusters are in `cluster` and in modules of single methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from shoal import tree
from shoal.client_table import ClientTable
from shoal.clusterers.validation import match_labels
from shoal.stages.base import CLUSTERING_LIBRARIES, ServerOnly
from shoal.stages.cluster import Clustering, Floats, Labels
from shoal.stages.vectors import UNBOUNDED
from shoal.types import ClientId, Params, Report, ServerState

WITHOUT_SAMPLES_SLOT = "idle"  # remembers clients that reported in the first round that they have no samples


class ClusterRule(Protocol):
    """Assigns clients to clusters by their rows, at first and after changes."""

    def __call__(self, rows: Floats, seed: int) -> Labels:
        """Returns the cluster of every client, from 0 without gaps."""

    def join(self, rows: Floats, labels: Labels, late_rows: Floats) -> Labels:
        """Returns the clusters of late-joining clients."""

    def recluster(self, rows: Floats, labels: Labels, new_rows: Floats, seed: int) -> tuple[Floats, Labels]:
        """Returns the rows to remember and the clusters of clients that reported `rows` before and `new_rows` now."""


@dataclass(frozen=True)
class VectorClusters:
    """Clusters that `rule` forms of vectors. A late-joining client joins the nearest cluster, and clusters are formed
    again where clients report other vectors. Of a vector in several parts only the first part is compared."""

    rule: Callable[[Floats, int], Clustering]  # (the vector of each client, seed)
    num_parts: int = 1

    def __call__(self, rows: Floats, seed: int) -> Labels:
        return self.rule(self._compared_part(rows), seed).labels

    def join(self, rows: Floats, labels: Labels, late_rows: Floats) -> Labels:
        from shoal.clusterers.neighbours import nearest_clusters

        return nearest_clusters(self._compared_part(rows), labels, self._compared_part(late_rows))

    def recluster(self, rows: Floats, labels: Labels, new_rows: Floats, seed: int) -> tuple[Floats, Labels]:
        return new_rows, self(new_rows, seed)

    def _compared_part(self, rows: Floats) -> Floats:
        return np.asarray(rows[:, : rows.shape[1] // self.num_parts])


@dataclass(frozen=True)
class ClusterModels(ServerOnly):
    """Forms clusters of clients from their reports and gives each cluster a model of its own.

    A late-joining client joins a cluster. When there are twice as many clients as the clusters were formed of, all
    clusters are formed again, so that a few early reports do not decide for the whole fleet. When clusters change,
    each cluster's model becomes the mean of the models that its members had. A client without samples is in no
    cluster. The metrics of a round are the number of clusters and the number of reassigned clients.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: ClusterRule
    column: str
    source: str = "represent"
    representation_bounds: tuple[float, float] = UNBOUNDED
    name: str = "cluster"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reported, before = ClientTable.load(state, self.source), ClientTable.load(state, self.name)
        reported = reported.filter(reported["size"].numpy() > 0) if len(reported) else reported
        if not len(reported):
            return state
        if reported.clients == before.clients and torch.equal(reported["told"], before["told"]):
            return self._with_metrics(state, before, before)
        rows, labels, num_formed_of = self._assign_to_clusters(reported, before, seed)
        count = int(labels.max()) + 1
        models = [self._carried_over_model(state, reported, before, labels == k) for k in range(count)]
        columns = {
            "expert": torch.from_numpy(labels),
            "rows": torch.from_numpy(rows).float(),
            "told": reported["told"],
            "of": torch.full((len(reported),), num_formed_of),  # of how many clients the clusters were formed
        }
        after = ClientTable(reported.clients, columns)
        state = replace(state, memory={**state.memory, self.name: after.to_tree()})
        return self._with_metrics(set_clusters(state, models, reported.clients, labels), before, after)

    def representation_width(self, state: ServerState) -> int | None:
        clusters = ClientTable.load(state, self.name)
        return int(clusters["rows"].shape[1]) if len(clusters) else None

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        """Returns weight 1 for the cluster that a late-joining client with this representation joins."""
        clusters = ClientTable.load(state, self.name)
        rows = clusters["rows"].double().numpy()
        label = int(self.rule.join(rows, clusters["expert"].numpy(), representation[None])[0])
        return np.eye(len(state.models))[label]

    def _with_metrics(self, state: ServerState, before: ClientTable, after: ClientTable) -> ServerState:
        old_labels = before.column("expert", after.clients)
        was_assigned = np.isfinite(old_labels)
        num_reassigned = count_reassigned(
            old_labels[was_assigned].astype(np.int64), after["expert"].numpy()[was_assigned]
        )
        new_metrics = {
            f"{self.name}.num_clusters": float(len(state.models)),
            f"{self.name}.num_reassigned": float(num_reassigned),
        }
        return replace(state, round_metrics={**state.round_metrics, **new_metrics})

    def _assign_to_clusters(self, reported: ClientTable, before: ClientTable, seed: int) -> tuple[Floats, Labels, int]:
        rows = reported[self.column].double().numpy().copy()
        num_formed_of = int(before["of"][0]) if len(before) else 0
        if len(reported) >= 2 * num_formed_of:
            return rows, np.asarray(self.rule(rows, seed), dtype=np.int64), len(reported)
        row_of_client = {c: i for i, c in enumerate(before.clients)}
        old_indices = np.array([row_of_client.get(c, -1) for c in reported.clients])
        is_assigned, labels = old_indices >= 0, np.zeros(len(reported), dtype=np.int64)
        old_rows, old_labels = (
            before["rows"].double().numpy()[old_indices[is_assigned]],
            before["expert"].numpy()[old_indices[is_assigned]],
        )
        rows[is_assigned], labels[is_assigned] = old_rows, old_labels
        if not torch.equal(reported["told"][is_assigned], before["told"][old_indices[is_assigned]]):
            new_rows = reported[self.column].double().numpy()[is_assigned]
            rows[is_assigned], labels[is_assigned] = self.rule.recluster(old_rows, old_labels, new_rows, seed)
        if not is_assigned.all():
            labels[~is_assigned] = self.rule.join(rows[is_assigned], labels[is_assigned], rows[~is_assigned])
        return rows, labels, num_formed_of

    def _carried_over_model(
        self, state: ServerState, reported: ClientTable, before: ClientTable, is_member: np.ndarray
    ) -> Params:
        """Returns the mean of the models that the members had.

        If no member had one, it is the mean over all clients, or the first model if there were no clusters before.
        """
        names, row_of_client = sorted(state.models), {c: i for i, c in enumerate(before.clients)}
        clusters_of_members = [
            int(before["expert"][row_of_client[c]])
            for c in np.array(reported.clients)[is_member].tolist()
            if c in row_of_client
        ]
        if not clusters_of_members:
            return (
                state.models[names[0]] if not len(before) else _mean_model(state, np.bincount(before["expert"].numpy()))
            )
        return _mean_model(state, np.bincount(clusters_of_members, minlength=len(names)))


def count_reassigned(old_labels: Labels, new_labels: Labels) -> int:
    """Returns how many clients are in another cluster, regardless of how the clusters are numbered now."""
    return int((match_labels(new_labels, old_labels) != old_labels).sum())


def _mean_model(state: ServerState, counts: np.ndarray) -> Params:
    names = sorted(state.models)
    named_weights = [(names[k], float(n)) for k, n in enumerate(counts.tolist()) if n]
    if len(named_weights) == 1:
        return state.models[named_weights[0][0]]
    return tree.weighted_mean([state.models[name] for name, _ in named_weights], [n for _, n in named_weights])


def set_clusters(
    state: ServerState, models: Sequence[Params], clients: Sequence[ClientId], labels: Labels
) -> ServerState:
    """Returns the state with a model for each cluster and with these clients as the only members."""
    return assign_clients(replace(state, models=named_experts(models), membership={}), clients, labels)


def named_experts(models: Sequence[Params]) -> dict[str, Params]:
    """Returns the models under names that sort in the order of the clusters."""
    digits = max(3, len(str(len(models) - 1)))
    return {f"expert-{k:0{digits}d}": model for k, model in enumerate(models)}


def assign_clients(state: ServerState, clients: Sequence[ClientId], labels: Labels) -> ServerState:
    """Returns the state with these clients in these clusters. All other clients stay as they are."""
    one_hot = torch.eye(len(state.models))
    memberships = {c: one_hot[k] for c, k in zip(clients, labels.tolist(), strict=True)}
    return replace(state, membership={**state.membership, **memberships})


def unassigned_clients(state: ServerState, slot: str) -> list[ClientId]:
    """Returns the present clients of no cluster, except those that `slot` remembers as clients without samples."""
    excluded = {*state.membership, *ClientTable.load(state, slot).clients}
    return [c for c in state.roster if c not in excluded]


def remember_without_samples(state: ServerState, slot: str, reports: Mapping[ClientId, Report]) -> ServerState:
    """Returns the state that remembers clients without samples in `slot`, so that they are not queried again."""
    without_samples = {c: {"told": torch.tensor(state.round)} for c, r in reports.items() if not r.counts["train"]}
    if not without_samples:
        return state
    remembered = ClientTable.load(state, slot).updated_with(ClientTable.from_rows(without_samples))
    return replace(state, memory={**state.memory, slot: remembered.to_tree()})


def expert_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the model of the client's cluster, or of the largest cluster for a client without one."""
    names, cluster = sorted(state.models), state.cluster_of(client)
    if cluster is not None:
        return {"expert": state.models[names[cluster]]}
    if not state.membership:
        return {"expert": state.models[names[0]]}
    sizes = torch.stack(list(state.membership.values())).sum(0)
    return {"expert": state.models[names[int(sizes.argmax())]]}
