"""Whether clients differ in more than how often classes occur: a probe, and experts where they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional as F

from shoal.clusterers.bisecting import bisected, unexplained
from shoal.clusterers.inputs import Floats, Labels, as_before, by_first_appearance
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.stages.balanced import TOLD
from shoal.stages.base import OneProgram, with_rows
from shoal.stages.beside import GLOBAL
from shoal.stages.experts import joined, numbered
from shoal.stages.overlap import direction
from shoal.stages.represent import vector
from shoal.table import Table
from shoal.types import FIXED, ClientId, ClientProgram, Params, Plan, Report, ServerState, Task

PROBE = "probe"


@dataclass(frozen=True)
class ShiftProbe(OneProgram):
    """Once, in round `at`, everybody trains the global model a little with a loss that leaves class frequencies out of
    account. What label distributions still explain of the ways that clients go is taken away. Where the rest is clearly
    apart, by a silhouette above `threshold`, each group has an expert from now on, which starts as the global model.
    Kept are the model and the groups' ways, for those who come later.

    With `every` all are asked again every so many rounds: groups follow, experts go on with those who had them, and
    where no groups are seen any longer those that there are remain.
    """

    program: ClientProgram
    trainable: tuple[str, ...] = field(metadata=FIXED)
    at: int = 20
    every: int = 0
    threshold: float = 0.115
    smallest: int = 3
    most: int = 2
    source: str = field(default=TOLD, metadata=FIXED)
    name: str = PROBE

    def __post_init__(self) -> None:
        for key, least in (("at", 0), ("every", 0), ("smallest", 1), ("most", 1)):
            if getattr(self, key) < least:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must be {least} or more")

    def due(self, round: int) -> bool:
        return round == self.at or (self.every > 0 and round > self.at and (round - self.at) % self.every == 0)

    def plan(self, state: ServerState, seed: int) -> Plan:
        sent = {GLOBAL: state.models[GLOBAL]}
        return Plan(self.program, {c: Task(sent, {}, derive_seed(seed, c)) for c in state.roster})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        told = {c: r.tensors["model"] for c, r in sorted(with_rows(reports).items())}
        start = state.models[GLOBAL]
        if not told:
            return state
        ways = {c: vector({k: model[k] - start[k] for k in self.trainable}) for c, model in told.items()}
        if not all(bool(way.isfinite().all()) for way in ways.values()):
            return state  # a client diverged: nothing can be said of ways
        clients = list(ways)
        rows = unexplained(torch.stack([direction(way) for way in ways.values()]).numpy(), self._told(state, clients))
        labels, silhouette = bisected(rows, self.threshold, self.smallest, self.most, seed)
        said = {f"{self.name}.silhouette": silhouette, f"{self.name}.groups": float(labels.max() + 1)}
        state = replace(state, figures={**state.figures, **said})
        if labels.max() == 0:
            return state
        labels = _numbered_as_before(state, clients, labels)
        means = [_mean_way([ways[c] for c, k in zip(clients, labels, strict=True) if k == g]) for g in _groups(labels)]
        kept = {"first": vector(start), "directions": torch.stack(means)}
        return self._split(replace(state, memory={**state.memory, self.name: kept}), clients, labels)

    def _told(self, state: ServerState, clients: list[ClientId]) -> Floats:
        """Label distributions; zeros of who told nothing, so that nothing is taken away."""
        known = Table.load(state, self.source)
        told = dict(zip(known.clients, known.columns.get("labels", ()), strict=True))
        width = known["labels"].shape[1] if len(known) else 1
        return torch.stack([told.get(c, torch.zeros(width)) for c in clients]).double().numpy()

    def _split(self, state: ServerState, clients: list[ClientId], labels: Labels) -> ServerState:
        """Experts of groups that there were go on; new ones start as the global model."""
        experts = [state.models[k] for k in sorted(state.models) if k != GLOBAL]
        start = state.models[GLOBAL]
        models: list[Params] = [experts[g] if g < len(experts) else start for g in _groups(labels)]
        state = replace(state, models=numbered(models) | {GLOBAL: start}, membership={})
        return joined(state, clients, np.searchsorted(_groups(labels), labels))


def _groups(labels: Labels) -> Labels:
    return np.unique(labels)


def _mean_way(ways: list[torch.Tensor]) -> torch.Tensor:
    return sum((F.normalize(way, dim=0) for way in ways[1:]), F.normalize(ways[0], dim=0)) / len(ways)


def _numbered_as_before(state: ServerState, clients: list[ClientId], labels: Labels) -> Labels:
    """Groups have the numbers of the experts that most of their members had."""
    known = np.array([c in state.membership for c in clients])
    if not known.any():
        return by_first_appearance(labels)[0]
    was = np.array([int(state.membership[c].argmax()) for c in clients if c in state.membership])
    named = dict(zip(labels[known].tolist(), as_before(labels[known], was).tolist(), strict=True))
    fresh = iter(range(max(*named.values(), was.max()) + 1, len(labels) + len(named) + int(was.max()) + 2))
    for group in _groups(labels).tolist():
        if group not in named:
            named[group] = next(fresh)
    return np.array([named[group] for group in labels.tolist()])
