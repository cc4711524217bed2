"""The training prior of each model: how often each class occurred in the samples that trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client.prior import mix_with_uniform
from shoal.client_table import ClientTable
from shoal.stages.balanced import REPRESENT_STAGE
from shoal.stages.base import with_samples
from shoal.stages.train import ServerUpdate, TrainAndAggregate
from shoal.types import ClientId, Params, Report, ServerState

TRAINING_PRIOR = "taught"


@dataclass(frozen=True)
class TrackTrainingPrior(ServerUpdate):
    """Counts, for every model, how often each class occurred in the samples that trained it, over all rounds.

    A client counts by its weight in the model. A new model that is a copy of another one also copies its counts.

    The predictions of a model favour classes that were frequent in training, and the prior correction removes this
    preference. Training with logits that are adjusted by a client's class prior, mixed with the fraction `uniform_mix`
    of a uniform distribution, removes most of it already. The remaining prior of a class is its frequency divided by
    the mean of these mixed priors. This is an approximation, because the aggregated model is not linear in the priors
    of the clients.
    """

    uniform_mix: float  # 1: training does not adjust the logits
    source: str = REPRESENT_STAGE
    slot: str = TRAINING_PRIOR

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        reported = ClientTable.load(before, self.source)
        if not len(reported):
            return after
        labels, sizes = reported["labels"].double(), reported["size"].tolist()
        row_of_client = {c: i for i, c in enumerate(reported.clients)}
        # With secure aggregation a training report has no number of samples, so the reported sizes replace it.
        sized_reports = {
            c: replace(r, counts={"train": sizes[row_of_client[c]]})
            for c, r in with_samples(reports).items()
            if c in row_of_client
        }
        counts = {}
        for name in before.models:
            weights = train.weights(before, name, sized_reports)
            w, p = torch.tensor(list(weights.values())).double(), labels[[row_of_client[c] for c in weights]]
            counts_before = self._counts_before(before, name, labels.shape[1])
            new = {"seen": w @ p, "adjusted": w @ mix_with_uniform(p, self.uniform_mix)}
            counts[name] = {k: counts_before[k] + x for k, x in new.items()}
        return replace(after, memory={**after.memory, self.slot: counts})

    def _counts_before(self, state: ServerState, name: str, num_classes: int) -> Params:
        remembered, model = state.memory.get(self.slot, {}), state.models[name]
        same_models = [
            k for k in (name, *remembered) if k in remembered and k in state.models and state.models[k] is model
        ]
        zero_counts = {k: torch.zeros(num_classes).double() for k in ("seen", "adjusted")}
        return remembered[same_models[0]] if same_models else zero_counts


def training_priors(state: ServerState, slot: str = TRAINING_PRIOR) -> dict[str, Tensor]:
    """Returns the training prior of each model, or nothing if no counts are known. No class has probability 0."""
    remembered = state.memory.get(slot, {})
    if not any(float(counts["seen"].sum()) for counts in remembered.values()):
        return {}
    remaining = {k: counts["seen"] / counts["adjusted"].clamp(min=1e-12) for k, counts in remembered.items()}
    return {k: mix_with_uniform(x, 0.001).float() for k, x in remaining.items()}
