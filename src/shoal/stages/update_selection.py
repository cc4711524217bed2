"""Selection by the last updates of the clients: diverse gradients (DELTA) or urns of similar updates (ClustLowVar)."""

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
    """Draws clients by the distance of their gradients from the mean and by the variance of their gradients.

    The training stage gets aggregation weights that correct for the unequal probabilities. After a client has trained,
    its probed gradient is replaced by the mean gradient of that training: the update, divided by the learning rate and
    by the displacement that momentum and the number of steps cause.
    """

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
        probed = ClientTable.load(state, PROBE_STAGE)
        if not len(probed):
            return state
        probed = self._with_training_gradients(probed, state)
        sizes = probed["size"].double().numpy()
        p = diversity.probabilities(
            probed["gradient"].numpy(), probed["variance"].double().numpy(), self.alpha1, self.alpha2, sizes
        )
        selected = diversity.draw(p, probed.is_present(state.roster), state.cohort_size, seed)
        # These multiply the weights of the training stage.
        weights = torch.from_numpy(diversity.importance_weights(p, np.ones(len(p)), selected))
        memory = {
            **state.memory,
            PROBE_STAGE: probed.to_tree(),
            self.name: ClientTable(probed.client_ids(selected), {"weight": weights}).to_tree(),
        }
        return replace(state, cohort=probed.client_ids(selected), memory=memory)

    def _with_training_gradients(self, probed: ClientTable, state: ServerState) -> ClientTable:
        trained = ClientTable.load(state, TRAIN_STAGE)
        lr = self.rate.at(max(0, state.round - 1))
        row_of_client = {c: i for i, c in enumerate(probed.clients)}
        gradient = probed["gradient"].clone()
        for update, client in zip(trained.columns.get("update", ()), trained.clients, strict=True):
            steps = self.epochs * -(-int(probed["size"][row_of_client[client]]) // self.batch_size)
            gradient[row_of_client[client]] = -update / max(1e-12, lr * sgd_displacement(steps, self.momentum))
        return ClientTable(probed.clients, {**probed.columns, "gradient": gradient})


def sgd_displacement(steps: int, momentum: float) -> float:
    """Returns how far SGD with learning rate 1 moves under a gradient of 1: sum over t of 1 + m + ... + m^(t-1)."""
    m = momentum
    return (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


@dataclass(frozen=True)
class SelectFromUrns(ServerOnly):
    """Draws one client from each urn. The clients of an urn have last updates of similar directions."""

    imports_later: ClassVar[tuple[str, ...]] = ("scipy.cluster.hierarchy",)

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        sizes = ClientTable.load(state, SIZE_STAGE)
        present = np.flatnonzero(sizes.is_present(state.roster))
        if not len(present):
            return state
        last_updates = ClientTable.load(state, self.name).updated_with(ClientTable.load(state, TRAIN_STAGE))
        row_of_client = {c: i for i, c in enumerate(last_updates.clients)}
        width = last_updates["update"].shape[1] if len(last_updates) else 1
        no_update = torch.zeros(width)
        clients = sizes.client_ids(present)
        updates = torch.stack(
            [last_updates["update"][row_of_client[c]] if c in row_of_client else no_update for c in clients]
        )
        r = urns.urn_distributions(
            sizes["size"].numpy()[present], updates.numpy(), min(state.cohort_size, len(present))
        )
        selected = urns.draw(r, np.arange(len(present)), seed)
        memory = {**state.memory, self.name: last_updates.to_tree()}
        return replace(state, cohort=sizes.client_ids(present[selected]), memory=memory)
