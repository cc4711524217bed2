"""A model for every group of clients: who is in which, and what becomes of models when groups change."""

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

WITHOUT_SAMPLES_SLOT = (
    "idle"  # the slot of clients that trained in the first round and reported that they have no samples
)


class ClusterRule(Protocol):
    def __call__(self, rows: Floats, seed: int) -> Labels:
        """The group of every client, from 0."""

    def join(self, rows: Floats, labels: Labels, late_rows: Floats) -> Labels:
        """The groups of clients that came later."""

    def recluster(self, rows: Floats, labels: Labels, new_rows: Floats, seed: int) -> tuple[Floats, Labels]:
        """The same clients, who tell `now` what they told as `rows` before: what is to be kept of it, and their groups
        after it."""


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
    """Groups clients by what they told and gives each group a model of its own.

    Newcomers join a group, until there are as many of them as of those that groups were formed of: then all are grouped
    anew, for a few early answers must not decide for a fleet. When groups change, each group's model is the mean of
    what its members had, so that nothing learned is lost. Who has no rows is in no group.

    Of every round it tells the number of groups, and how many clients are in another group than before.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    rule: ClusterRule
    column: str
    source: str = "represent"
    representation_bounds: tuple[float, float] = UNBOUNDED
    name: str = "cluster"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, before = ClientTable.load(state, self.source), ClientTable.load(state, self.name)
        known = known.filter(known["size"].numpy() > 0) if len(known) else known
        if not len(known):
            return state
        if known.clients == before.clients and torch.equal(known["told"], before["told"]):
            return self._with_metrics(state, before, before)
        rows, labels, num_formed_of = self._assign_to_clusters(known, before, seed)
        count = int(labels.max()) + 1
        models = [self._carried_over_model(state, known, before, labels == k) for k in range(count)]
        columns = {
            "expert": torch.from_numpy(labels),
            "rows": torch.from_numpy(rows).float(),
            "told": known["told"],
            "of": torch.full((len(known),), num_formed_of),  # how many clients groups were formed of
        }
        after = ClientTable(known.clients, columns)
        state = replace(state, memory={**state.memory, self.name: after.to_tree()})
        return self._with_metrics(set_clusters(state, models, known.clients, labels), before, after)

    def representation_width(self, state: ServerState) -> int | None:
        known = ClientTable.load(state, self.name)
        return int(known["rows"].shape[1]) if len(known) else None

    def cluster_weights(self, state: ServerState, representation: Floats) -> Floats:
        """A client joins as late-joining clients do."""
        known = ClientTable.load(state, self.name)
        rows = known["rows"].double().numpy()
        label = int(self.rule.join(rows, known["expert"].numpy(), representation[None])[0])
        return np.eye(len(state.models))[label]

    def _with_metrics(self, state: ServerState, before: ClientTable, after: ClientTable) -> ServerState:
        old_labels = before.column("expert", after.clients)
        stayed = np.isfinite(old_labels)
        moved = count_reassigned(old_labels[stayed].astype(np.int64), after["expert"].numpy()[stayed])
        counts = {f"{self.name}.groups": float(len(state.models)), f"{self.name}.moved": float(moved)}
        return replace(state, round_metrics={**state.round_metrics, **counts})

    def _assign_to_clusters(self, known: ClientTable, before: ClientTable, seed: int) -> tuple[Floats, Labels, int]:
        rows = known[self.column].double().numpy().copy()
        num_formed_of = int(before["of"][0]) if len(before) else 0
        if len(known) >= 2 * num_formed_of:
            return rows, np.asarray(self.rule(rows, seed), dtype=np.int64), len(known)
        row_of_client = {c: i for i, c in enumerate(before.clients)}
        old = np.array([row_of_client.get(c, -1) for c in known.clients])
        is_assigned, labels = old >= 0, np.zeros(len(known), dtype=np.int64)
        old_rows, old_labels = (
            before["rows"].double().numpy()[old[is_assigned]],
            before["expert"].numpy()[old[is_assigned]],
        )
        rows[is_assigned], labels[is_assigned] = old_rows, old_labels
        if not torch.equal(known["told"][is_assigned], before["told"][old[is_assigned]]):
            new_rows = known[self.column].double().numpy()[is_assigned]
            rows[is_assigned], labels[is_assigned] = self.rule.recluster(old_rows, old_labels, new_rows, seed)
        if not is_assigned.all():
            labels[~is_assigned] = self.rule.join(rows[is_assigned], labels[is_assigned], rows[~is_assigned])
        return rows, labels, num_formed_of

    def _carried_over_model(
        self, state: ServerState, known: ClientTable, before: ClientTable, is_member: np.ndarray
    ) -> Params:
        """The mean of what the members of a group had; the first model where nobody had any."""
        names, row_of_client = sorted(state.models), {c: i for i, c in enumerate(before.clients)}
        clusters_of_members = [
            int(before["expert"][row_of_client[c]])
            for c in np.array(known.clients)[is_member].tolist()
            if c in row_of_client
        ]
        if not clusters_of_members:
            return (
                state.models[names[0]] if not len(before) else _mean_model(state, np.bincount(before["expert"].numpy()))
            )
        return _mean_model(state, np.bincount(clusters_of_members, minlength=len(names)))


def count_reassigned(old_labels: Labels, new_labels: Labels) -> int:
    """How many clients are in another group, whatever numbers groups have now."""
    return int((match_labels(new_labels, old_labels) != old_labels).sum())


def _mean_model(state: ServerState, counts: np.ndarray) -> Params:
    names = sorted(state.models)
    used = [(names[k], float(n)) for k, n in enumerate(counts.tolist()) if n]
    if len(used) == 1:
        return state.models[used[0][0]]
    return tree.weighted_mean([state.models[name] for name, _ in used], [n for _, n in used])


def set_clusters(
    state: ServerState, models: Sequence[Params], clients: Sequence[ClientId], labels: Labels
) -> ServerState:
    """Each group with its model, and nobody in a group but these clients."""
    return assign_clients(replace(state, models=named_experts(models), membership={}), clients, labels)


def named_experts(models: Sequence[Params]) -> dict[str, Params]:
    """By names that sort in the order of the groups."""
    digits = max(3, len(str(len(models) - 1)))
    return {f"expert-{k:0{digits}d}": model for k, model in enumerate(models)}


def assign_clients(state: ServerState, clients: Sequence[ClientId], labels: Labels) -> ServerState:
    """These clients in these groups, everybody else as before."""
    one_hot = torch.eye(len(state.models))
    found = {c: one_hot[k] for c, k in zip(clients, labels.tolist(), strict=True)}
    return replace(state, membership={**state.membership, **found})


def unassigned_clients(state: ServerState, slot: str) -> list[ClientId]:
    """Who is in no group and may join one: not those of whom `slot` knows that they have no rows."""
    idle = {*state.membership, *ClientTable.load(state, slot).clients}
    return [c for c in state.roster if c not in idle]


def remember_without_samples(state: ServerState, slot: str, reports: Mapping[ClientId, Report]) -> ServerState:
    """Who told that it has no rows is remembered in `slot`: nothing comes of asking again."""
    idle = {c: {"told": torch.tensor(state.round)} for c, r in reports.items() if not r.counts["train"]}
    if not idle:
        return state
    known = ClientTable.load(state, slot).updated_with(ClientTable.from_rows(idle))
    return replace(state, memory={**state.memory, slot: known.to_tree()})


def expert_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """A client's own group's model; for a client that is in none, that of the largest group."""
    names, cluster = sorted(state.models), state.cluster_of(client)
    if cluster is not None:
        return {"expert": state.models[names[cluster]]}
    if not state.membership:
        return {"expert": state.models[names[0]]}
    sizes = torch.stack(list(state.membership.values())).sum(0)
    return {"expert": state.models[names[int(sizes.argmax())]]}
