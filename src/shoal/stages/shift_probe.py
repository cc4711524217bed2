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
from shoal.stages.base import CLUSTERING, OneProgram, with_rows
from shoal.stages.experts import joined, noted, numbered, without_group
from shoal.stages.global_and_experts import GLOBAL
from shoal.stages.vectors import restored, row, vector
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

PROBE, IDLE = "probe", "probe-idle"
COLUMNS = ("count", "sum", "square")


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

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING

    program: ClientProgram
    at: int = option(20, "Run the first shift probe after this many rounds. 0 runs it before the first round.", ge=0)
    every: int = option(20, "Repeat the shift probe after this many rounds. 0 probes only once.", ge=0)
    threshold: float = option(
        0.1,
        "Split clients into clusters only if their class means are further apart than this many variances within a "
        "class.",
    )
    agreement: float = option(
        MIN_AGREEMENT,
        "Split clients only if both halves of their samples show the same difference, with a cosine above this value.",
        ge=-1,
        lt=1,
    )
    smallest: int = option(3, "Do not split a cluster if a part would have fewer clients than this.", ge=1)
    most: int = option(4, "Split clients into at most this many clusters.", ge=1)
    stay: float = option(
        0.5,
        "Move a client only if another cluster is nearer by more than this fraction of the distance between both. "
        "0 moves it to the nearest cluster.",
        ge=0,
        lt=1,
    )
    name: str = PROBE

    @property
    def schedule(self) -> Schedule:
        return Schedule("all", (Rounds(self.at, self.every),), "unassigned")

    def _asks_all(self, round: int) -> bool:
        return self.schedule.clients_in(round) == "all"

    def plan(self, state: ServerState, seed: int) -> Plan:
        newcomers = without_group(state, IDLE) if state.membership else []
        asked = state.roster if self._asks_all(state.round) else newcomers
        model = {GLOBAL: self._model(state)} if asked else {}
        return Plan(self.program, {c: Task(model, {}, derive_seed(seed, c)) for c in asked}, cache_models=True)

    def _model(self, state: ServerState) -> Params:
        kept = state.memory.get(f"{self.name}-model", {})
        return restored(kept["first"], state.models[GLOBAL]) if kept else state.models[GLOBAL]

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        fresh = ClientTable.from_rows({c: row(r) for c, r in with_rows(reports).items() if _finite(r)})
        state = noted(state, IDLE, reports)
        if not len(fresh):
            return state
        before = ClientTable.load(state, self.name)
        known = before.updated_with(fresh)
        first = vector(self._model(state))
        state = replace(
            state, memory={**state.memory, self.name: known.to_tree(), f"{self.name}-model": {"first": first}}
        )
        was = {c: int(weights.argmax()) for c, weights in state.membership.items()}
        here = known.filter(known.is_present(state.roster))
        labels, parents, figures = self._placed(before, here, was), dict[int, int](), dict[str, float]()
        experts = [state.models[k] for k in sorted(state.models) if k != GLOBAL]
        if self._asks_all(state.round):
            limits = (self.threshold, self.smallest, self.most, seed, max(1, len(experts)), self.agreement)
            labels, effect, agreement, parents = split_clusters_by_shift(_read(here), labels, *limits)
            figures = {"effect": effect, "agreement": agreement}
        found = dict(zip(here.clients, labels.tolist(), strict=True))
        figures["moved"] = float(sum(was.get(c, g) != g for c, g in found.items()))
        figures["groups"] = float(max(1, len(experts)) + len(parents))
        state = replace(
            state, round_metrics={**state.round_metrics, **{f"{self.name}.{k}": x for k, x in figures.items()}}
        )
        return _with_experts(state, experts, parents, {**was, **found}) if experts or parents else state

    def _placed(self, before: ClientTable, here: ClientTable, was: Mapping[ClientId, int]) -> Labels:
        """Who is here among the groups that there are. A group is where its members were before this round."""
        if not was:
            return np.zeros(len(here), dtype=np.int64)
        members = before.filter(before.is_present(list(was)))
        both = ClientTable(members.clients + here.clients, {k: torch.cat([members[k], here[k]]) for k in COLUMNS})
        every, *_ = _read(both)  # in the same units
        first, rest = np.split(np.arange(len(both)), [len(members)])
        groups, then = np.unique([was[c] for c in members.clients], return_inverse=True)
        own = np.array([np.searchsorted(groups, was[c]) if c in was else -1 for c in here.clients])
        return groups[
            assign_nearest(every.select_rows(rest), every.select_rows(first).centres(then, len(groups)), own, self.stay)
        ]


def _with_experts(
    state: ServerState, experts: Sequence[Params], parents: Mapping[int, int], member: Mapping[ClientId, int]
) -> ServerState:
    """Experts go on; one that is cut off starts as that which it is cut off, the first ones as the global model."""
    models = list(experts) or [state.models[GLOBAL]]
    for parent in parents.values():
        models.append(models[parent])
    state = replace(state, models=numbered(models) | {GLOBAL: state.models[GLOBAL]}, membership={})
    return joined(state, list(member), np.array(list(member.values())))


def _read(known: ClientTable) -> tuple[ClassMeans, ClassMeans, ClassMeans]:
    halves, classes = 2, known["count"].shape[1] // 2
    count = known["count"].view(len(known), halves, classes)
    return class_means(
        count.numpy(), known["sum"].view(len(known), halves, classes, -1).numpy(), known["square"].numpy()
    )


def _finite(report: Report) -> bool:
    return all(bool(x.isfinite().all()) for part in report.tensors.values() for x in part.values())
