"""In every group of clients those who train within a time budget, by a bandit over sets (FedEPC's CICS)."""

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
    "select.choice is bandit and select.literal is false",
    lambda select: select.choice == "bandit" and not select.as_published,
)
Predecessor = tuple[
    int, bool
]  # the group of the round before that a group goes on from, and whether nobody came or went


@dataclass(frozen=True)
class SelectByBandit(ServerOnly, HasOptions):
    """Context vectors (Eq. 9) from devices and history, sets of clients whose summed time fits the group's budget, the
    set with the best upper confidence bound (Eq. 10-11). A group in which nobody fits sits out and may return.

    A set's reward is how much of the loss of its whole group it took away, by the seconds of its slowest client: all
    members tell their loss in every round, since what a set itself tells says more about its data than about what the
    group gained. `choice=waiting` takes the set that has waited longest, `choice=random` any that fits: what the
    bandit must beat, without those questions.
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
        only_if=OnlyIf("select.choice is bandit or select.tolerance is above 0", lambda select: select.asks),
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
        only_if=OnlyIf("select.choice is not random", lambda select: select.choice != "random"),
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
        only_if=OnlyIf("select.choice is bandit", lambda select: select.choice == "bandit"),
    )
    cluster_slot: str = "cluster"
    size_slot: str = "represent"
    probe_slot: str = "probe"
    train_slot: str = "train"
    name: str = "select"

    @property
    def uses_losses(self) -> bool:
        """Whether it needs to know the loss of every client in every round."""
        return self.rule == "bandit" or self.tolerance > 0

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        grouped = ClientTable.load(state, self.cluster_slot)
        if not len(grouped):
            return state
        memory = state.memory.get(self.name, {})
        before, groups = ClientTable.from_tree(memory.get("history", {})), memory.get("groups", {})
        heirs = _predecessors(grouped, before)
        history = self._updated_history(state, grouped, before, heirs)
        facts = self._client_features(state, grouped, history)
        here, chosen, entries = grouped.is_present(state.roster), np.zeros(len(grouped), dtype=bool), {}
        for expert, (old_cluster, has_same_members) in heirs.items():
            inside = np.flatnonzero(grouped["expert"].numpy() == expert)
            entry = self._with_reward(groups.get(str(old_cluster), {}), history, inside, state.round)
            entry = entry if has_same_members else {k: v for k, v in entry.items() if k != "settled"}
            picked = inside[self._selected(entry, facts, inside, here[inside], derive_seed(seed, expert))]
            entries[str(expert)] = self._with_pending_set(entry, facts, picked, state.round)
            chosen[picked] = True
        asked = torch.where(torch.from_numpy(chosen), state.round, history["asked"])
        history = ClientTable(history.clients, {**history.columns, "asked": asked})
        cohort = grouped.client_ids(np.flatnonzero(chosen))
        memory = {"history": history.to_tree(), "groups": entries}
        return replace(state, cohort=cohort, memory={**state.memory, self.name: memory})

    def _updated_history(
        self, state: ServerState, clusters: ClientTable, before: ClientTable, predecessors: Mapping[int, Predecessor]
    ) -> ClientTable:
        """What each client told of its loss in the last rounds and how long its last updates were, the newest last;
        when it was last asked to train. Losses under another group's model are not compared: they are forgotten."""
        old = {c: {k: before[k][i] for k in before.columns} for i, c in enumerate(before.clients)}
        nothing = torch.tensor([torch.nan])
        blank = {"loss": nothing.repeat(self.history + 1), "norm": nothing.repeat(self.history)}
        newcomer = blank | {"asked": torch.tensor(state.round - 1), "expert": torch.tensor(-1)}
        reported_losses, sent = ClientTable.load(state, self.probe_slot), ClientTable.load(state, self.train_slot)
        asked = (
            zip(reported_losses.clients, reported_losses["told"].tolist(), reported_losses["loss"], strict=True)
            if len(reported_losses)
            else ()
        )
        losses = {c: loss for c, round, loss in asked if round == state.round}
        norms = dict(zip(sent.clients, sent["norm"], strict=True)) if len(sent) else {}
        rows = {}
        for c, expert in zip(clusters.clients, clusters["expert"], strict=True):
            row = old.get(c, newcomer)
            row = row if int(row["expert"]) == predecessors[int(expert)][0] else row | {"loss": blank["loss"]}
            loss = torch.cat([row["loss"][1:], losses.get(c, nothing).reshape(1)])
            norm = torch.cat([row["norm"][1:], norms[c].reshape(1)]) if c in norms else row["norm"]
            rows[c] = {"loss": loss, "norm": norm, "asked": row["asked"], "expert": expert}
        return ClientTable.from_rows(rows)

    def _client_features(self, state: ServerState, clusters: ClientTable, history: ClientTable) -> dict[str, Floats]:
        size = ClientTable.load(state, self.size_slot).column("size", clusters.clients)
        known = [state.devices.get(c) for c in clusters.clients]
        speed = speeds(state, clusters.clients)
        ram = np.array([float(d.memory_bytes) if d else np.nan for d in known])
        loss, norm = history["loss"].double().numpy(), history["norm"].double().numpy()
        raw = np.stack(
            [speed, ram, size, _mean_of_known(norm), _mean_of_known(-np.diff(loss, axis=1))], axis=1
        )  # Eq. (9)
        cost = training_durations(size, speed)
        waited = (state.round - 1 - history["asked"].numpy()).astype(np.float64)
        return {"x": standardised_contexts(raw), "cost": cost / max(1e-300, float(cost.mean())), "waited": waited}

    def _with_reward(self, entry: Tree, history: ClientTable, inside: NDArray[np.int64], round_index: int) -> Tree:
        """The bandit after the reward of the set that it chose last: 0 where nobody of it came back in time."""
        before, after = history["loss"].double().numpy()[inside, -2:].T
        both = np.isfinite(before) & np.isfinite(after)  # the same clients' losses, or it is the data that is compared
        if not both.any() or before[both].mean() <= 0:
            return entry
        drop = 1 - float(after[both].mean() / before[both].mean())
        settled = int(entry.get("settled", 0)) + 1 if abs(drop) < self.tolerance else 0
        entry = {**entry, "settled": torch.tensor(settled)}
        if "members" not in entry or int(entry["round"]) != round_index - 1:
            return entry
        bandit = self._loaded_bandit(entry)
        bandit.learn(entry["members"].numpy(), drop / max(1e-12, float(entry["slowest"])))
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
        cost = features["cost"][inside]
        limit, waited = (
            time_budget(cost[is_present], self.time_budget_fraction, self.quantile),
            features["waited"][inside],
        )
        if self.rule == "bandit":
            return self._loaded_bandit(entry).choose(features["x"][inside], cost, is_present, limit, seed, waited)
        sets = candidate_sets(
            cost, is_present, limit, seed, num_sets=1 if self.rule == "random" else self.num_candidate_sets
        )
        return np.flatnonzero(sets[np.argmax(sets @ waited)]) if len(sets) else np.empty(0, dtype=np.int64)

    def _with_pending_set(
        self, entry: Tree, features: Mapping[str, Floats], selected: NDArray[np.int64], round_index: int
    ) -> Tree:
        """What there is to remember of a group until its reward is known."""
        if not len(selected):
            return {k: v for k, v in entry.items() if k != "members"}
        chosen = {
            "members": torch.from_numpy(features["x"][selected]),
            "slowest": torch.tensor(features["cost"][selected].max()),
            "round": torch.tensor(round_index),
        }
        return entry | chosen

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
    """For every group that of which it has more than half, and which has more than half of it; -1 if there is none.
    Whatever number it has now, it goes on with what was learned about that. And whether it is just the same."""
    old_clusters, new_clusters = before.column("expert", clusters.clients), clusters["expert"].numpy()
    found = {}
    for expert in np.unique(new_clusters):
        inside = old_clusters[new_clusters == expert]
        olds, counts = np.unique(inside[np.isfinite(inside)], return_counts=True)
        num_shared = int(counts.max(initial=0))
        old = int(olds[counts.argmax()]) if num_shared else -1
        size = int((before["expert"] == old).sum()) if num_shared else 0
        goes_on = 2 * num_shared > len(inside) and 2 * num_shared > size
        found[int(expert)] = (old if goes_on else -1, goes_on and num_shared == len(inside) == size)
    return found


def _mean_of_known(values: Floats) -> Floats:
    """Over what is known of each client; NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
