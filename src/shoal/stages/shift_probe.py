"""Whether clients differ in more than how often classes occur: a probe, experts where they do, and who moves later."""

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
    """In round `at`, and again every `every` rounds (0: never), all tell how their rows of each class look to the same
    model: the global one of the first probe, which clients keep. Where a class looks different from one group of
    clients to another, by more than `threshold` variances within a class, and either half of their rows says so (a
    cosine above `agreement`; `clusterers.conditional_shift`), each group has an expert from then on. The first ones
    start as the global model, one that is cut off another as that one.

    Whoever comes when there are groups tells it at once and joins the nearest. Whose data have changed moves to another
    group if it is clearly nearer to it (`stay`), by what members told before. Groups may be cut again, up to `most`,
    those whose members are away or gone among them, and are never joined. Of each probe it tells effect and agreement
    of the clearest cut, how many groups there are and how many clients are in another one than before.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    program: ClientProgram
    first_round: int = option(
        20, "Run the first shift probe after this many rounds. 0 runs it before the first round.", ge=0
    )
    every_rounds: int = option(20, "Repeat the shift probe after this many rounds. 0 probes only once.", ge=0)
    min_effect: float = option(
        0.1,
        "Split clients into clusters only if their class means are further apart than this many variances within a "
        "class.",
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
        "Move a client only if another cluster is nearer by more than this fraction of the distance between both. "
        "0 moves it to the nearest cluster.",
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
        newcomers = unassigned_clients(state, WITHOUT_SAMPLES_SLOT) if state.membership else []
        asked = state.roster if self._queries_all(state.round) else newcomers
        model = {GLOBAL: self._probe_model(state)} if asked else {}
        return Plan(self.program, {c: Task(model, {}, derive_seed(seed, c)) for c in asked}, cache_models=True)

    def _probe_model(self, state: ServerState) -> Params:
        kept = state.memory.get(f"{self.name}-model", {})
        return unflatten_params(kept["first"], state.models[GLOBAL]) if kept else state.models[GLOBAL]

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        fresh = ClientTable.from_rows({c: report_row(r) for c, r in with_samples(reports).items() if _is_finite(r)})
        state = remember_without_samples(state, WITHOUT_SAMPLES_SLOT, reports)
        if not len(fresh):
            return state
        before = ClientTable.load(state, self.name)
        known = before.updated_with(fresh)
        first = flatten_params(self._probe_model(state))
        state = replace(
            state, memory={**state.memory, self.name: known.to_tree(), f"{self.name}-model": {"first": first}}
        )
        old_clusters = {c: int(weights.argmax()) for c, weights in state.membership.items()}
        here = known.filter(known.is_present(state.roster))
        labels, parents, figures = (
            self._assign_to_clusters(before, here, old_clusters),
            dict[int, int](),
            dict[str, float](),
        )
        experts = [state.models[k] for k in sorted(state.models) if k != GLOBAL]
        if self._queries_all(state.round):
            limits = (
                self.min_effect,
                self.min_cluster_size,
                self.max_clusters,
                seed,
                max(1, len(experts)),
                self.min_agreement,
            )
            labels, effect, agreement, parents = split_clusters_by_shift(_class_means(here), labels, *limits)
            figures = {"effect": effect, "agreement": agreement}
        found = dict(zip(here.clients, labels.tolist(), strict=True))
        figures["moved"] = float(sum(old_clusters.get(c, g) != g for c, g in found.items()))
        figures["groups"] = float(max(1, len(experts)) + len(parents))
        state = replace(
            state, round_metrics={**state.round_metrics, **{f"{self.name}.{k}": x for k, x in figures.items()}}
        )
        return _with_experts(state, experts, parents, {**old_clusters, **found}) if experts or parents else state

    def _assign_to_clusters(
        self, before: ClientTable, present: ClientTable, old_clusters: Mapping[ClientId, int]
    ) -> Labels:
        """Who is here among the groups that there are. A group is where its members were before this round."""
        if not old_clusters:
            return np.zeros(len(present), dtype=np.int64)
        members = before.filter(before.is_present(list(old_clusters)))
        both = ClientTable(
            members.clients + present.clients, {k: torch.cat([members[k], present[k]]) for k in MOMENT_COLUMNS}
        )
        every, *_ = _class_means(both)  # in the same units
        first, rest = np.split(np.arange(len(both)), [len(members)])
        groups, then = np.unique([old_clusters[c] for c in members.clients], return_inverse=True)
        own = np.array([np.searchsorted(groups, old_clusters[c]) if c in old_clusters else -1 for c in present.clients])
        return groups[
            assign_nearest(
                every.select_rows(rest), every.select_rows(first).centres(then, len(groups)), own, self.switch_margin
            )
        ]


def _with_experts(
    state: ServerState, experts: Sequence[Params], parents: Mapping[int, int], cluster_of_client: Mapping[ClientId, int]
) -> ServerState:
    """Experts go on; one that is cut off starts as that which it is cut off, the first ones as the global model."""
    models = list(experts) or [state.models[GLOBAL]]
    for parent in parents.values():
        models.append(models[parent])
    state = replace(state, models=named_experts(models) | {GLOBAL: state.models[GLOBAL]}, membership={})
    return assign_clients(state, list(cluster_of_client), np.array(list(cluster_of_client.values())))


def _class_means(known: ClientTable) -> tuple[ClassMeans, ClassMeans, ClassMeans]:
    halves, classes = 2, known["count"].shape[1] // 2
    count = known["count"].view(len(known), halves, classes)
    return class_means(
        count.numpy(), known["sum"].view(len(known), halves, classes, -1).numpy(), known["square"].numpy()
    )


def _is_finite(report: Report) -> bool:
    return all(bool(x.isfinite().all()) for part in report.tensors.values() for x in part.values())
