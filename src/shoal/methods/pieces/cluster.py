"""Which clients belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.client.shift_probe import ClassFeatures
from shoal.client_table import Table
from shoal.methods.composition.builder import Draft, Piece
from shoal.methods.composition.model_functions import mean_predict, numbered_init, received_model_predict
from shoal.methods.pieces.represent import told_labels
from shoal.rng import derive_seed
from shoal.stages.cluster import Adaptive, Floats, Group, Labels, Repulsive, Similar
from shoal.stages.experts import Experts, expert_for, numbered
from shoal.stages.extract import extractor_for
from shoal.stages.first_round_clusters import FIRST, Neighbours, TrainApart, trained_by
from shoal.stages.global_and_experts import served_beside, trained_beside
from shoal.stages.overlapping import Overlap, Overlapping, experts_for
from shoal.stages.shift_probe import ShiftProbe
from shoal.stages.train import Federate
from shoal.types import FIXED, Params, ServerState, Stage


def similar(d: Draft) -> None:
    rule = d.s.make("cluster", Similar, cohort=d.s.cohort)
    d.stages["cluster"].append(Group(rule, column="labels", source=told_labels(d)))


def repulsive(d: Draft) -> None:
    rule = d.s.make("cluster", Repulsive, cohort=d.s.cohort)
    d.stages["cluster"].append(Group(rule, column="labels", source=told_labels(d)))


def aidc(d: Draft) -> None:
    rule, sparsity = d.s.make("cluster", Adaptive), d.made["sparsity"]
    experts = Experts(rule, column="sparsity")

    def assign(state: ServerState, x: Tensor) -> Mapping[str, Params]:
        """An unseen client has no labels to adapt by: the received model's vectors are compared, on the client, so
        that nothing leaves it."""
        known = Table.load(state, experts.name)
        if not len(known):
            return expert_for(state, None)
        with torch.no_grad():
            vector = sparsity.received(extractor_for(state, None)["extractor"], x).cpu().double().numpy()
        group = rule.like(known["rows"].double().numpy(), known["expert"].numpy(), vector)
        return {"expert": state.models[sorted(state.models)[group]]}

    with_groups(d)
    d.stages["cluster"].append(experts)
    d.assign = assign


@dataclass(frozen=True)
class NearVectors(Neighbours):
    """DBSCAN on what clients told of themselves; of a sparsity vector on the part that is of the adapted model."""

    parts: int = field(default=1, metadata=FIXED)

    def __call__(self, rows: Floats, seed: int = 0) -> Labels:  # type: ignore[override]
        return super().__call__(self._row(rows)).labels_

    def join(self, rows: Floats, labels: Labels, newcomers: Floats) -> Labels:
        from shoal.clusterers.neighbours import nearest

        return nearest(self._row(rows), labels, self._row(newcomers))

    def again(self, rows: Floats, labels: Labels, now: Floats, seed: int) -> tuple[Floats, Labels]:
        return now, self(now, seed)

    def _row(self, rows: Floats) -> Floats:
        return np.asarray(rows[:, : rows.shape[1] // self.parts])


def dbscan(d: Draft) -> None:
    with_groups(d)
    if not d.has("represent", "last-layer"):
        parts, column = (4, "sparsity") if d.has("represent", "sparsity") else (1, "labels")
        d.stages["cluster"].append(Experts(d.s.make("cluster", NearVectors, parts=parts), column=column))
        return
    s, rule = d.s, d.s.make("cluster", Neighbours)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        return ServerState(0, numbered([s.model.init(first)]), memory={FIRST: {"seed": torch.tensor(first)}})

    def apart(train: Federate) -> Stage:
        return TrainApart(train, rule, s.model, average=d.first_models)

    d.init, d.around, d.trains, d.serves = init, apart, trained_by(s.model), expert_for


def mctc(d: Draft) -> None:
    rule = d.s.make("cluster", Overlap)
    d.init = numbered_init(d.s.model)
    d.models, d.trains = "overlapping", experts_for
    d.around = lambda train: Overlapping(train, rule, d.s.model.trainable)
    d.predict = mean_predict(d.s.model)


def shift(d: Draft) -> None:
    program = d.s.make("probe", ClassFeatures, model=d.s.model)
    d.models, d.trains = "beside", trained_beside
    d.stages["cluster"].append(d.s.make("probe", ShiftProbe, program=program))
    d.serves = served_beside


def with_groups(d: Draft) -> None:
    """Each group has a model of its own, and a client is in one."""
    d.models, d.trains, d.predict = "groups", expert_for, received_model_predict(d.s.model)


PIECES = {
    "none": Piece(lambda d: None, "-", single=False),
    "similar": Piece(
        similar,
        "paper 002, Sec. III-A",
        tells="who has labels like whose",
        needs={"select": ("one-of-each", "whole-groups")},
        why="groups of similar clients are there to be chosen from, and share one model",
        single=False,
    ),
    "repulsive": Piece(
        repulsive,
        "paper 002, Eq. 3, Alg. 1",
        tells="which clients make up for each other's labels",
        needs={"select": ("one-of-each", "whole-groups")},
        why="mixed groups are there to be chosen from, and share one model",
        single=False,
    ),
    "aidc": Piece(
        aidc,
        "paper 000, Eq. 3-8, Alg. 2 (AIDC)",
        tells="who is like whom",
        needs={"represent": ("sparsity",)},
        why="it tells difference from chance by the halves of rows that sparsity vectors are also told of",
        single=False,
    ),
    "dbscan": Piece(
        dbscan,
        "paper 004, Alg. 2, 9-15",
        tells="who is like whom",
        needs={"represent": ("last-layer", "labels", "sparsity")},
        why="it must know what clients are compared by",
        single=False,
    ),
    "mctc": Piece(
        mctc,
        "paper 001, Alg. 1, Eq. 3-5 (MCTC)",
        keeps="the experts of all clusters that it is in",
        tells="who is like whom, in every round",
        needs={"represent": ("updates",)},
        why="clients are in several clusters by where training took them",
        single=False,
    ),
    "shift": Piece(
        shift,
        "shoal's own",
        sends="how its rows of each class look to the global model: sums of features, in some rounds",
        keeps="once there are groups, their experts beside the global model",
        tells="these sums, the label counts among them; and, once groups are seen, who is in which",
        needs={"personalise": ("gate",)},
        why="members of groups train an expert beside the global model, which nothing but a gate makes use of",
        single=False,
    ),
}
