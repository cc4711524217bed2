"""Selection of a set of clients in every cluster, within a time budget, by a bandit over sets (CICS of FedEPC).

The bandit itself is `shoal.selectors.bandit`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.selectors.bandit import SetBandit, candidate_sets, standardised_contexts, time_budget
from shoal.stages.base import ServerOnly
from shoal.stages.fastest import speeds, training_durations
from shoal.types import ClientId, HasOptions, OnlyIf, Report, ServerState, Tree, option

Floats = NDArray[np.float64]
IF_BANDIT_IS_IMPROVED = OnlyIf(
    "select.rule is bandit and select.as_published is false",
    lambda select: select.rule == "bandit" and not select.as_published,
)
# the cluster of the round before that a cluster continues (-1: none), and whether its members are the same
Predecessor = tuple[int, bool]


@dataclass(frozen=True)
class SelectByBandit(ServerOnly, HasOptions):
    """Selects the set of clients with the best upper confidence bound (Eq. 10-11) in every cluster.

    Only sets within the time budget of the cluster are candidates. A cluster in which no client fits the budget does
    not train in the round and may train again later. The context vector of a client (Eq. 9) comes from its device and
    its history. The reward of a set is the relative decrease of the loss of its whole cluster, divided by the training
    time of its slowest client. All members report their loss in every round, because the losses of the set alone
    depend more on its data than on the progress of the cluster. The rules `waiting` and `random` are baselines that
    need no such reports.
    """

    imports_later: ClassVar[tuple[str, ...]] = ("scipy.linalg", "scipy.spatial.distance")

    rule: Literal["bandit", "waiting", "random"] = option(
        "bandit",
        "Select the set of clients with the best bandit score (bandit), the set that has waited longest (waiting) or a "
        "random set (random), always within the time budget of each cluster.",
    )
    time_budget_fraction: float = option(
        0.16,
        "A cluster's time budget per round is this fraction of the summed training time of its clients.",
        gt=0,
        le=1,
    )
    quantile: float = option(
        1.0,
        "Raise the time budget to at least the training time at this quantile of the cluster's clients. With 1 the "
        "slowest client always fits.",
        gt=0,
        le=1,
    )
    history: int = option(
        5,
        "Judge each client by its losses and the lengths of its updates in this many past rounds.",
        ge=1,
        only_if=OnlyIf("select.rule is bandit or select.tolerance is above 0", lambda select: select.uses_losses),
    )
    beta_scale: float = option(
        0.2,
        "Multiply the exploration bonus in the bandit score by this factor. 0 never explores.",
        ge=0,
        only_if=IF_BANDIT_IS_IMPROVED,
    )
    waiting_bonus: float = option(
        0.5,
        "Add this multiple of the standardised waiting time of a set of clients to its bandit score. 0 ignores "
        "waiting.",
        ge=0,
        only_if=IF_BANDIT_IS_IMPROVED,
    )
    num_candidate_sets: int = option(
        48,
        "Draw this many random sets of clients within the time budget and select one of them.",
        ge=1,
        only_if=OnlyIf("select.rule is not random", lambda select: select.rule != "random"),
    )
    tolerance: float = option(
        0.0,
        "Stop training a cluster after its loss has changed by less than this fraction in select.history rounds in a "
        "row. 0 never stops a cluster.",
        ge=0,
    )
    as_published: bool = option(
        False,
        "Compute the bandit score with the equations exactly as the paper prints them, without improvements.",
        only_if=OnlyIf("select.rule is bandit", lambda select: select.rule == "bandit"),
    )
    cluster_slot: str = "cluster"
    size_slot: str = "represent"
    probe_slot: str = "probe"
    train_slot: str = "train"
    name: str = "select"

    @property
    def uses_losses(self) -> bool:
        """Whether every client must report its loss in every round."""
        return self.rule == "bandit" or self.tolerance > 0

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        clusters = ClientTable.load(state, self.cluster_slot)
        if not len(clusters):
            return state
        memory = state.memory.get(self.name, {})
        before, old_entries = ClientTable.from_tree(memory.get("history", {})), memory.get("groups", {})
        predecessors = _predecessors(clusters, before)
        history = self._updated_history(state, clusters, before, predecessors)
        features = self._client_features(state, clusters, history)
        is_present, is_selected, entries = clusters.is_present(state.roster), np.zeros(len(clusters), dtype=bool), {}
        for expert, (old_cluster, has_same_members) in predecessors.items():
            in_cluster = np.flatnonzero(clusters["expert"].numpy() == expert)
            entry = self._with_reward(old_entries.get(str(old_cluster), {}), history, in_cluster, state.round)
            entry = entry if has_same_members else {k: v for k, v in entry.items() if k != "settled"}
            selected = in_cluster[
                self._selected(entry, features, in_cluster, is_present[in_cluster], derive_seed(seed, expert))
            ]
            entries[str(expert)] = self._with_pending_set(entry, features, selected, state.round)
            is_selected[selected] = True
        last_selected = torch.where(torch.from_numpy(is_selected), state.round, history["asked"])
        history = ClientTable(history.clients, {**history.columns, "asked": last_selected})
        cohort = clusters.client_ids(np.flatnonzero(is_selected))
        memory = {"history": history.to_tree(), "groups": entries}
        return replace(state, cohort=cohort, memory={**state.memory, self.name: memory})

    def _updated_history(
        self, state: ServerState, clusters: ClientTable, before: ClientTable, predecessors: Mapping[int, Predecessor]
    ) -> ClientTable:
        """Returns the history of each client: its last losses, the norms of its last updates, and its last selection.

        The newest values come last. Losses of a client that has changed its cluster are removed, because losses under
        different models cannot be compared.
        """
        old_rows = {c: {k: before[k][i] for k in before.columns} for i, c in enumerate(before.clients)}
        unknown = torch.tensor([torch.nan])
        blank = {"loss": unknown.repeat(self.history + 1), "norm": unknown.repeat(self.history)}
        new_client = blank | {"asked": torch.tensor(state.round - 1), "expert": torch.tensor(-1)}
        reported_losses, trained = ClientTable.load(state, self.probe_slot), ClientTable.load(state, self.train_slot)
        reported_by_client = (
            zip(reported_losses.clients, reported_losses["told"].tolist(), reported_losses["loss"], strict=True)
            if len(reported_losses)
            else ()
        )
        losses = {c: loss for c, round, loss in reported_by_client if round == state.round}
        norms = dict(zip(trained.clients, trained["norm"], strict=True)) if len(trained) else {}
        rows = {}
        for c, expert in zip(clusters.clients, clusters["expert"], strict=True):
            row = old_rows.get(c, new_client)
            row = row if int(row["expert"]) == predecessors[int(expert)][0] else row | {"loss": blank["loss"]}
            loss = torch.cat([row["loss"][1:], losses.get(c, unknown).reshape(1)])
            norm = torch.cat([row["norm"][1:], norms[c].reshape(1)]) if c in norms else row["norm"]
            rows[c] = {"loss": loss, "norm": norm, "asked": row["asked"], "expert": expert}
        return ClientTable.from_rows(rows)

    def _client_features(self, state: ServerState, clusters: ClientTable, history: ClientTable) -> dict[str, Floats]:
        size = ClientTable.load(state, self.size_slot).column("size", clusters.clients)
        devices = [state.devices.get(c) for c in clusters.clients]
        speed = speeds(state, clusters.clients)
        ram = np.array([float(d.memory_bytes) if d else np.nan for d in devices])
        loss, norm = history["loss"].double().numpy(), history["norm"].double().numpy()
        raw = np.stack(
            [speed, ram, size, _mean_of_known(norm), _mean_of_known(-np.diff(loss, axis=1))], axis=1
        )  # Eq. (9)
        cost = training_durations(size, speed)
        waited = (state.round - 1 - history["asked"].numpy()).astype(np.float64)
        return {"x": standardised_contexts(raw), "cost": cost / max(1e-300, float(cost.mean())), "waited": waited}

    def _with_reward(self, entry: Tree, history: ClientTable, inside: NDArray[np.int64], round_index: int) -> Tree:
        """Returns the entry after its bandit has learned the reward of the last set.

        The relative decrease of the loss is 0 if no client of the set reported in time.
        """
        before, after = history["loss"].double().numpy()[inside, -2:].T
        is_comparable = np.isfinite(before) & np.isfinite(after)  # other clients would have other data
        if not is_comparable.any() or before[is_comparable].mean() <= 0:
            return entry
        relative_decrease = 1 - float(after[is_comparable].mean() / before[is_comparable].mean())
        num_settled_rounds = int(entry.get("settled", 0)) + 1 if abs(relative_decrease) < self.tolerance else 0
        entry = {**entry, "settled": torch.tensor(num_settled_rounds)}
        if "members" not in entry or int(entry["round"]) != round_index - 1:
            return entry
        bandit = self._loaded_bandit(entry)
        bandit.learn(entry["members"].numpy(), relative_decrease / max(1e-12, float(entry["slowest"])))
        return {**entry, "bandit": {k: torch.from_numpy(np.asarray(v)) for k, v in bandit.state().items()}}

    def _selected(
        self,
        entry: Tree,
        features: Mapping[str, Floats],
        inside: NDArray[np.int64],
        is_present: NDArray[np.bool_],
        seed: int,
    ) -> NDArray[np.int64]:
        if int(entry.get("settled", 0)) >= self.history:
            return np.empty(0, dtype=np.int64)
        costs = features["cost"][inside]
        budget, waited = (
            time_budget(costs[is_present], self.time_budget_fraction, self.quantile),
            features["waited"][inside],
        )
        if self.rule == "bandit":
            return self._loaded_bandit(entry).choose(features["x"][inside], costs, is_present, budget, seed, waited)
        sets = candidate_sets(
            costs, is_present, budget, seed, num_sets=1 if self.rule == "random" else self.num_candidate_sets
        )
        return np.flatnonzero(sets[np.argmax(sets @ waited)]) if len(sets) else np.empty(0, dtype=np.int64)

    def _with_pending_set(
        self, entry: Tree, features: Mapping[str, Floats], selected: NDArray[np.int64], round_index: int
    ) -> Tree:
        """Returns the entry of a cluster with the set that waits for its reward."""
        if not len(selected):
            return {k: v for k, v in entry.items() if k != "members"}
        pending = {
            "members": torch.from_numpy(features["x"][selected]),
            "slowest": torch.tensor(features["cost"][selected].max()),
            "round": torch.tensor(round_index),
        }
        return entry | pending

    def _loaded_bandit(self, entry: Tree) -> SetBandit:
        if self.as_published:
            bandit = SetBandit(
                as_published=True,
                beta_scale=1.0,
                noise=1.0,
                window_rounds=sys.maxsize,
                num_candidate_sets=self.num_candidate_sets,
            )
        else:
            bandit = SetBandit(
                beta_scale=self.beta_scale, waiting_bonus=self.waiting_bonus, num_candidate_sets=self.num_candidate_sets
            )
        return bandit.load({k: v.numpy() for k, v in entry["bandit"].items()}) if "bandit" in entry else bandit


def _predecessors(clusters: ClientTable, before: ClientTable) -> dict[int, Predecessor]:
    """Returns, for every cluster, its predecessor in the round before and whether both have the same members.

    The predecessor shares more than half of its members with the cluster and more than half of the cluster's members
    with it. It is -1 if there is none. A cluster continues the history of its predecessor, whatever their numbers are.
    """
    old_clusters, new_clusters = before.column("expert", clusters.clients), clusters["expert"].numpy()
    predecessors = {}
    for expert in np.unique(new_clusters):
        old_clusters_of_members = old_clusters[new_clusters == expert]
        candidates, counts = np.unique(
            old_clusters_of_members[np.isfinite(old_clusters_of_members)], return_counts=True
        )
        num_shared = int(counts.max(initial=0))
        predecessor = int(candidates[counts.argmax()]) if num_shared else -1
        size = int((before["expert"] == predecessor).sum()) if num_shared else 0
        is_continued = 2 * num_shared > len(old_clusters_of_members) and 2 * num_shared > size
        predecessors[int(expert)] = (
            predecessor if is_continued else -1,
            is_continued and num_shared == len(old_clusters_of_members) == size,
        )
    return predecessors


def _mean_of_known(values: Floats) -> Floats:
    """Returns the mean of each row over its finite values, and NaN for a row without any."""
    is_known = np.isfinite(values)
    count = is_known.sum(axis=1)
    total = np.where(is_known, values, 0.0).sum(axis=1)
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
