"""A probe for conditional shift between clients, which splits clients into clusters with experts.

`shoal.clusterers.conditional_shift` splits clusters, and `shoal.client.shift_probe` is the program that clients run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shoal.client_table import ClientTable
from shoal.clusterers.conditional_shift import (
    MIN_AGREEMENT,
    ClassMeans,
    assign_nearest,
    class_means,
    split_clusters_by_shift,
)
from shoal.clusterers.validation import Labels
from shoal.rng import derive_seed
from shoal.stages.base import CLUSTERING_LIBRARIES, OneProgram, with_samples
from shoal.stages.experts import assign_clients, named_experts, remember_without_samples, unassigned_clients
from shoal.stages.global_and_experts import GLOBAL
from shoal.stages.vectors import flatten_params, report_row, unflatten_params
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    Params,
    Plan,
    Report,
    Rounds,
    Schedule,
    ServerState,
    Task,
    option,
)

PROBE_STAGE, WITHOUT_SAMPLES_SLOT = "probe", "probe-idle"
MOMENT_COLUMNS = ("count", "sum", "square")


@dataclass(frozen=True)
class ShiftProbe(OneProgram, HasOptions):
    """Splits clients into clusters with experts if the features of a class differ between clients (conditional shift).

    After `first_round` rounds, and then every `every_rounds` rounds (0: never), all clients report the feature moments
    of their samples of each class. The features come from the global model of the first probe, which clients cache. A
    cluster is split if the squared distance of the parts' class means is above `min_effect` variances, and if
    both halves of the samples show the same difference (a cosine above `min_agreement`). The first experts start as
    the global model, and a new expert starts as the expert of the cluster that was split.

    A late-joining client reports at once and joins the nearest cluster. A client whose data have changed moves to
    another cluster if that is clearly nearer (`switch_margin`) to its report than its own cluster. The position of a
    cluster follows from the earlier reports of its members. Clusters can be split again, until there are `max_clusters`
    (also counting clusters without present members), and are never merged. The metrics of a probe are the effect and
    the agreement of the clearest split, the number of clusters and the number of reassigned clients.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    program: ClientProgram
    first_round: int = option(
        20, "Run the first shift probe after this many rounds. 0 runs it before the first round.", ge=0
    )
    every_rounds: int = option(20, "Repeat the shift probe after this many rounds. 0 probes only once.", ge=0)
    min_effect: float = option(
        0.1,
        "Split clients into clusters only if the squared distance of their class means is more than this many "
        "variances within a class.",
    )
    min_agreement: float = option(
        MIN_AGREEMENT,
        "Split clients only if both halves of their samples show the same difference, with a cosine above this value.",
        ge=-1,
        lt=1,
    )
    min_cluster_size: int = option(3, "Do not split a cluster if a part would have fewer clients than this.", ge=1)
    max_clusters: int = option(4, "Split clients into at most this many clusters.", ge=1)
    switch_margin: float = option(
        0.5,
        "Move a client only if another cluster is nearer than its own by more than this fraction of the distance "
        "between the two clusters. 0 always moves it to the nearest cluster.",
        ge=0,
        lt=1,
    )
    name: str = PROBE_STAGE

    @property
    def schedule(self) -> Schedule:
        return Schedule("all", (Rounds(self.first_round, self.every_rounds),), "unassigned")

    def _queries_all(self, round_index: int) -> bool:
        return self.schedule.clients_in(round_index) == "all"

    def plan(self, state: ServerState, seed: int) -> Plan:
        without_cluster = unassigned_clients(state, WITHOUT_SAMPLES_SLOT) if state.membership else []
        queried = state.roster if self._queries_all(state.round) else without_cluster
        model = {GLOBAL: self._probe_model(state)} if queried else {}
        return Plan(self.program, {c: Task(model, {}, derive_seed(seed, c)) for c in queried}, cache_models=True)

    def _probe_model(self, state: ServerState) -> Params:
        remembered = state.memory.get(f"{self.name}-model", {})
        return unflatten_params(remembered["first"], state.models[GLOBAL]) if remembered else state.models[GLOBAL]

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        reported = ClientTable.from_rows({c: report_row(r) for c, r in with_samples(reports).items() if _is_finite(r)})
        state = remember_without_samples(state, WITHOUT_SAMPLES_SLOT, reports)
        if not len(reported):
            return state
        before = ClientTable.load(state, self.name)
        moments = before.updated_with(reported)
        first_model = flatten_params(self._probe_model(state))
        state = replace(
            state, memory={**state.memory, self.name: moments.to_tree(), f"{self.name}-model": {"first": first_model}}
        )
        old_clusters = {c: int(weights.argmax()) for c, weights in state.membership.items()}
        present = moments.filter(moments.is_present(state.roster))
        labels, parents, metrics = (
            self._assign_to_clusters(before, present, old_clusters),
            dict[int, int](),
            dict[str, float](),
        )
        experts = [state.models[k] for k in sorted(state.models) if k != GLOBAL]
        if self._queries_all(state.round):
            labels, effect, agreement, parents = split_clusters_by_shift(
                _class_means(present),
                labels,
                self.min_effect,
                self.min_cluster_size,
                self.max_clusters,
                seed,
                num_clusters=max(1, len(experts)),
                min_agreement=self.min_agreement,
            )
            metrics = {"effect": effect, "agreement": agreement}
        new_clusters = dict(zip(present.clients, labels.tolist(), strict=True))
        metrics["num_reassigned"] = float(sum(old_clusters.get(c, g) != g for c, g in new_clusters.items()))
        metrics["num_clusters"] = float(max(1, len(experts)) + len(parents))
        state = replace(
            state, round_metrics={**state.round_metrics, **{f"{self.name}.{k}": value for k, value in metrics.items()}}
        )
        return _with_experts(state, experts, parents, {**old_clusters, **new_clusters}) if experts or parents else state

    def _assign_to_clusters(
        self, before: ClientTable, present: ClientTable, old_clusters: Mapping[ClientId, int]
    ) -> Labels:
        """Returns the cluster of each present client: the nearest one, or its own if no other is clearly nearer."""
        if not old_clusters:
            return np.zeros(len(present), dtype=np.int64)
        members = before.filter(before.is_present(list(old_clusters)))
        members_and_present = ClientTable(
            members.clients + present.clients, {k: torch.cat([members[k], present[k]]) for k in MOMENT_COLUMNS}
        )
        means, *_ = _class_means(
            members_and_present
        )  # of members and present clients together, so that they have the same units
        member_rows, present_rows = np.split(np.arange(len(members_and_present)), [len(members)])
        clusters, member_clusters = np.unique([old_clusters[c] for c in members.clients], return_inverse=True)
        own_clusters = np.array(
            [np.searchsorted(clusters, old_clusters[c]) if c in old_clusters else -1 for c in present.clients]
        )
        return clusters[
            assign_nearest(
                means.select_rows(present_rows),
                means.select_rows(member_rows).centres(member_clusters, len(clusters)),
                own_clusters,
                self.switch_margin,
            )
        ]


def _with_experts(
    state: ServerState, experts: Sequence[Params], parents: Mapping[int, int], cluster_of_client: Mapping[ClientId, int]
) -> ServerState:
    """Returns the state with the existing experts and a new one, a copy of its parent, for each split.

    The first experts are copies of the global model.
    """
    models = list(experts) or [state.models[GLOBAL]]
    for parent in parents.values():
        models.append(models[parent])
    state = replace(state, models=named_experts(models) | {GLOBAL: state.models[GLOBAL]}, membership={})
    return assign_clients(state, list(cluster_of_client), np.array(list(cluster_of_client.values())))


def _class_means(moments: ClientTable) -> tuple[ClassMeans, ClassMeans, ClassMeans]:
    """Returns the means over all samples, over the first half of the samples and over the second half."""
    halves, classes = 2, moments["count"].shape[1] // 2
    count = moments["count"].view(len(moments), halves, classes)
    return class_means(
        count.numpy(), moments["sum"].view(len(moments), halves, classes, -1).numpy(), moments["square"].numpy()
    )


def _is_finite(report: Report) -> bool:
    return all(bool(x.isfinite().all()) for part in report.tensors.values() for x in part.values())
