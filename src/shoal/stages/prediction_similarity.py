"""Clusters of clients whose models predict the same classes for samples of the server (FLIS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.client_table import ClientTable
from shoal.clusterers.prediction_similarity import inference_similarity, similarity_clusters
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.base import OneProgram
from shoal.stages.cluster import Floats, Labels
from shoal.stages.vectors import unflatten_params
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    OnlyIf,
    Plan,
    Report,
    Rounds,
    Schedule,
    ServerState,
    Task,
    option,
)

SHARE_STAGE, TRAIN_STAGE = "share", "train"


def shared_samples(state: ServerState, model: Model) -> tuple[Tensor, Tensor]:
    """Returns the samples that clients shared, and their labels if clients shared them.

    A client's row of the table has weights before the inputs, because a client with few samples leaves the rest empty.
    """
    shared = ClientTable.load(state, SHARE_STAGE)
    if not len(shared):
        return torch.empty(0), torch.empty(0)
    count = shared["rows"].shape[1] // (1 + int(np.prod(model.input_shape)))
    is_sample = shared["rows"][:, :count].reshape(-1) > 0
    x = shared["rows"][:, count:].reshape(-1, *model.input_shape)[is_sample]
    y = shared["labels"].reshape(-1)[is_sample].long() if "labels" in shared.columns else torch.empty(0)
    return x.to(model.device), y.to(model.device)


@dataclass(frozen=True)
class QueryPredictions(OneProgram):
    """Predicts the shared samples with each client's newest model. A client without one trains a model for this."""

    program: ClientProgram
    models_for: ModelsFor
    model: Model
    name: str = "represent"
    schedule: ClassVar[Schedule] = Schedule("all", (Rounds(0, 0),), "late-joining")

    def plan(self, state: ServerState, seed: int) -> Plan:
        reported_clients = set(ClientTable.load(state, self.name).clients)
        queried = [c for c in state.roster if c not in reported_clients]
        return Plan(self.program, {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in queried})

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        x, _ = shared_samples(state, self.model)
        sent = ClientTable.load(state, TRAIN_STAGE)
        flat_models, template = sent.columns.get("model", ()), next(iter(state.models.values()))
        models = {c: unflatten_params(row, template) for c, row in zip(sent.clients, flat_models, strict=True)}
        models |= {c: r.tensors["model"] for c, r in reports.items()}
        if not len(x) or not models:
            return state
        with torch.no_grad():
            predictions = {c: {"predicted": self.model.predict(m, x).argmax(-1).cpu()} for c, m in models.items()}
        reported = ClientTable.load(state, self.name).updated_with(ClientTable.from_rows(predictions))
        return replace(state, memory={**state.memory, self.name: reported.to_tree()})


@dataclass(frozen=True)
class PredictionAgreement(HasOptions):
    """Puts clients whose models agree on the shared samples into one cluster.

    It forms `num_clusters` clusters, or joins clients that agree on at least the fraction `threshold` of the samples.
    """

    group: ClassVar[str] = "cluster"
    num_clusters: int = option(
        0,
        "Form this many clusters of clients with similar predictions. 0 forms clusters by cluster.threshold instead.",
        ge=0,
    )
    threshold: float = option(
        0.5,
        "All models of a cluster agree on at least this fraction of the shared samples.",
        ge=0,
        le=1,
        only_if=OnlyIf("cluster.num_clusters is 0", lambda rule: not rule.num_clusters),
    )

    def __call__(self, rows: Floats, seed: int, cohort_size: int = 0) -> Labels:
        similarity = inference_similarity(rows.astype(np.int64))
        if self.num_clusters:
            return similarity_clusters(similarity, n_clusters=self.num_clusters)
        return similarity_clusters(similarity, self.threshold)
