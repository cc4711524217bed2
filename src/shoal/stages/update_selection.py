"""Choice by what clients sent when they last trained: how diverse (DELTA) or how similar (ClustLowVar) it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shoal.client_table import ClientTable
from shoal.selectors import diversity, urns
from shoal.stages.base import ServerOnly
from shoal.stages.select import SIZE_STAGE
from shoal.stages.train import LearningRate
from shoal.types import ClientId, HasOptions, Report, ServerState, option

PROBE_STAGE, TRAIN_STAGE = "probe", "train"


@dataclass(frozen=True)
class SelectByGradientDiversity(ServerOnly, HasOptions):
    """Clients drawn by how far their gradients are from the mean and how much they vary; aggregation weights that
    make up for it are left for the training stage. A probe's gradient is replaced by the mean one of the training
    that followed it: the change of the model over the learning rate and what momentum makes of the number of steps."""

    rate: LearningRate
    epochs: int
    batch_size: int
    momentum: float
    alpha1: float = option(
        0.5, "Weight the distance of a client's gradient from the mean gradient by this in the selection.", ge=0
    )
    alpha2: float = option(
        0.5, "Weight the variance of a client's gradient between batches by this in the selection.", ge=0
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known = ClientTable.load(state, PROBE_STAGE)
        if not len(known):
            return state
        known = self._with_training_gradients(known, state)
        sizes = known["size"].double().numpy()
        p = diversity.probabilities(
            known["gradient"].numpy(), known["variance"].double().numpy(), self.alpha1, self.alpha2, sizes
        )
        rows = diversity.draw(p, known.is_present(state.roster), state.cohort_size, seed)
        weights = torch.from_numpy(
            diversity.importance_weights(p, np.ones(len(p)), rows)
        )  # beside those of the training
        memory = {
            **state.memory,
            PROBE_STAGE: known.to_tree(),
            self.name: ClientTable(known.client_ids(rows), {"weight": weights}).to_tree(),
        }
        return replace(state, cohort=known.client_ids(rows), memory=memory)

    def _with_training_gradients(self, known: ClientTable, state: ServerState) -> ClientTable:
        sent = ClientTable.load(state, TRAIN_STAGE)
        lr = self.rate.at(max(0, state.round - 1))
        row_of_client = {c: i for i, c in enumerate(known.clients)}
        gradient = known["gradient"].clone()
        for update, client in zip(sent.columns.get("update", ()), sent.clients, strict=True):
            steps = self.epochs * -(-int(known["size"][row_of_client[client]]) // self.batch_size)
            gradient[row_of_client[client]] = -update / max(1e-12, lr * sgd_displacement(steps, self.momentum))
        return ClientTable(known.clients, {**known.columns, "gradient": gradient})


def sgd_displacement(steps: int, momentum: float) -> float:
    """How far a constant gradient of 1 takes SGD with learning rate 1: sum over t of 1 + m + ... + m^(t-1)."""
    m = momentum
    return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


@dataclass(frozen=True)
class SelectFromUrns(ServerOnly):
    """One client from each of as many urns as clients take part; urns hold clients whose last updates point alike."""

    imports_later: ClassVar[tuple[str, ...]] = ("scipy.cluster.hierarchy",)

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        sizes = ClientTable.load(state, SIZE_STAGE)
        here = np.flatnonzero(sizes.is_present(state.roster))
        if not len(here):
            return state
        seen = ClientTable.load(state, self.name).updated_with(ClientTable.load(state, TRAIN_STAGE))
        row_of_client = {c: i for i, c in enumerate(seen.clients)}
        width = seen["update"].shape[1] if len(seen) else 1
        unknown = torch.zeros(width)
        clients = sizes.client_ids(here)
        updates = torch.stack([seen["update"][row_of_client[c]] if c in row_of_client else unknown for c in clients])
        r = urns.urn_distributions(sizes["size"].numpy()[here], updates.numpy(), min(state.cohort_size, len(here)))
        rows = urns.draw(r, np.arange(len(here)), seed)
        memory = {**state.memory, self.name: seen.to_tree()}
        return replace(state, cohort=sizes.client_ids(here[rows]), memory=memory)
