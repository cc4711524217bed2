"""A model for every group of clients: who is in which, and what becomes of models when groups change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from shoal import tree
from shoal.stages.base import ServerOnly
from shoal.stages.cluster import Floats, Labels
from shoal.stages.table import Table
from shoal.types import FIXED, ClientId, Params, Report, ServerState


class Grouping(Protocol):
    def __call__(self, rows: Floats, seed: int) -> Labels:
        """The group of every client, from 0."""

    def join(self, rows: Floats, labels: Labels, newcomers: Floats) -> Labels:
        """The groups of clients that came later."""


@dataclass(frozen=True)
class Experts(ServerOnly):
    """Groups clients by what they told and gives each group a model of its own.

    Newcomers join a group. When clients told anew, groups are formed anew, and each new group's model is the mean of
    what its members had, so that nothing learned is lost.
    """

    rule: Grouping
    column: str = field(metadata=FIXED)
    source: str = field(default="represent", metadata=FIXED)
    name: str = "cluster"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known, before = Table.load(state, self.source), Table.load(state, self.name)
        if not len(known) or (known.clients == before.clients and torch.equal(known["told"], before["told"])):
            return state
        labels, formed = self._labels(known, before, state.round, seed)
        count = int(labels.max()) + 1
        models = [self._carried(state, known, before, labels == k) for k in range(count)]
        columns = {
            "expert": torch.from_numpy(labels),
            "told": known["told"],
            "formed": torch.full((len(known),), formed),  # the round in which groups were last formed anew
        }
        memory = {**state.memory, self.name: Table(known.clients, columns).tree()}
        return grouped(replace(state, memory=memory), models, known.clients, labels)

    def _labels(self, known: Table, before: Table, round: int, seed: int) -> tuple[Labels, int]:
        rows = known[self.column].double().numpy()
        place = {c: i for i, c in enumerate(before.clients)}
        old = np.array([place.get(c, -1) for c in known.clients])
        settled = old >= 0
        same = len(before) > 0 and torch.equal(known["told"][settled], before["told"][old[settled]])
        if not same:
            return np.asarray(self.rule(rows, seed), dtype=np.int64), round
        labels = np.zeros(len(known), dtype=np.int64)
        labels[settled] = before["expert"].numpy()[old[settled]]
        labels[~settled] = self.rule.join(rows[settled], labels[settled], rows[~settled])
        return labels, int(before["formed"][0])

    def _carried(self, state: ServerState, known: Table, before: Table, inside: np.ndarray) -> Params:
        """The mean of what the members of a group had; the first model where nobody had any."""
        names, place = sorted(state.models), {c: i for i, c in enumerate(before.clients)}
        had = [int(before["expert"][place[c]]) for c in np.array(known.clients)[inside].tolist() if c in place]
        if not had:
            return state.models[names[0]] if not len(before) else _mean(state, np.bincount(before["expert"].numpy()))
        return _mean(state, np.bincount(had, minlength=len(names)))


def _mean(state: ServerState, counts: np.ndarray) -> Params:
    names = sorted(state.models)
    used = [(names[k], float(n)) for k, n in enumerate(counts.tolist()) if n]
    if len(used) == 1:
        return state.models[used[0][0]]
    return tree.weighted_mean([state.models[name] for name, _ in used], [n for _, n in used])


def grouped(state: ServerState, models: Sequence[Params], clients: Sequence[ClientId], labels: Labels) -> ServerState:
    """Each group with its model, and nobody in a group but these clients."""
    digits = max(3, len(str(len(models) - 1)))  # sorted by name, models must be in the order of their groups
    named = {f"expert-{k:0{digits}d}": model for k, model in enumerate(models)}
    return joined(replace(state, models=named, membership={}), clients, labels)


def joined(state: ServerState, clients: Sequence[ClientId], labels: Labels) -> ServerState:
    """These clients in these groups, everybody else as before."""
    marks = torch.eye(len(state.models))
    found = {c: marks[k] for c, k in zip(clients, labels.tolist(), strict=True)}
    return replace(state, membership={**state.membership, **found})


def expert_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """A client's own group's model; for a client that is in none, that of the largest group."""
    names = sorted(state.models)
    if client is not None and client in state.membership:
        return {"expert": state.models[names[int(state.membership[client].argmax())]]}
    if not state.membership:
        return {"expert": state.models[names[0]]}
    sizes = torch.stack(list(state.membership.values())).sum(0)
    return {"expert": state.models[names[int(sizes.argmax())]]}
