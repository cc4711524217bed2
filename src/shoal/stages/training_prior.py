"""How often classes occurred in what each model was trained on."""

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
    """Counts, for every model, how often each class occurred in the samples that trained it, over all rounds. A client
    counts by its weight in the model. A new model starts as a copy of another one, and with its counts.

    A model's answers lean towards what it saw often, and who knows the frequencies can take this away again. A loss
    that is adjusted by a client's prior, mixed with `lam` of equal classes, has taken most of it away already. What is
    left of a class is taken to be its frequency over the mean of these priors, which is an approximation: how clients'
    steps add up to one model is not linear in their priors.
    """

    uniform_mix: float  # 1: the loss is not adjusted
    source: str = REPRESENT_STAGE
    slot: str = TRAINING_PRIOR

    def after_aggregation(
        self, train: TrainAndAggregate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        known = ClientTable.load(before, self.source)
        if not len(known):
            return after
        labels, sizes = known["labels"].double(), known["size"].tolist()
        row_of_client = {c: i for i, c in enumerate(known.clients)}
        # sizes as they were told: with secure sums a report does not say how many rows there are
        known_reports = {
            c: replace(r, counts={"train": sizes[row_of_client[c]]})
            for c, r in with_samples(reports).items()
            if c in row_of_client
        }
        counts = {}
        for name in before.models:
            weights = train.weights(before, name, known_reports)
            w, p = torch.tensor(list(weights.values())).double(), labels[[row_of_client[c] for c in weights]]
            counted = self._counts_before(before, name, labels.shape[1])
            new = {"seen": w @ p, "adjusted": w @ mix_with_uniform(p, self.uniform_mix)}
            counts[name] = {k: counted[k] + x for k, x in new.items()}
        return replace(after, memory={**after.memory, self.slot: counts})

    def _counts_before(self, state: ServerState, name: str, num_classes: int) -> Params:
        kept, model = state.memory.get(self.slot, {}), state.models[name]
        same_models = [k for k in (name, *kept) if k in kept and k in state.models and state.models[k] is model]
        none = {k: torch.zeros(num_classes).double() for k in ("seen", "adjusted")}
        return kept[same_models[0]] if same_models else none


def training_priors(state: ServerState, slot: str = TRAINING_PRIOR) -> dict[str, Tensor]:
    """The prior that each model's answers lean towards, if anything is known: no class is unheard of."""
    kept = state.memory.get(slot, {})
    if not any(float(counts["seen"].sum()) for counts in kept.values()):
        return {}
    left = {k: counts["seen"] / counts["adjusted"].clamp(min=1e-12) for k, counts in kept.items()}
    return {k: mix_with_uniform(x, 0.001).float() for k, x in left.items()}
