"""How often classes occurred in what each model was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.client.prior import mix_with_uniform
from shoal.client_table import ClientTable
from shoal.stages.balanced import TOLD
from shoal.stages.base import with_rows
from shoal.stages.train import Federate, ServerUpdate
from shoal.types import ClientId, Params, Report, ServerState

TAUGHT = "taught"


@dataclass(frozen=True)
class TrackTrainingPrior(ServerUpdate):
    """Counts, for every model, how often each class occurred in the samples that trained it, over all rounds. A client
    counts by its weight in the model. A new model starts as a copy of another one, and with its counts.

    A model's answers lean towards what it saw often, and who knows the frequencies can take this away again. A loss
    that is adjusted by a client's prior, mixed with `lam` of equal classes, has taken most of it away already. What is
    left of a class is taken to be its frequency over the mean of these priors, which is an approximation: how clients'
    steps add up to one model is not linear in their priors.
    """

    lam: float  # 1: the loss is not adjusted
    source: str = TOLD
    slot: str = TAUGHT

    def after(
        self, train: Federate, before: ServerState, after: ServerState, reports: Mapping[ClientId, Report]
    ) -> ServerState:
        known = ClientTable.load(before, self.source)
        if not len(known):
            return after
        labels, sizes = known["labels"].double(), known["size"].tolist()
        place = {c: i for i, c in enumerate(known.clients)}
        # sizes as they were told: with secure sums a report does not say how many rows there are
        heard = {c: replace(r, counts={"train": sizes[place[c]]}) for c, r in with_rows(reports).items() if c in place}
        counts = {}
        for name in before.models:
            weights = train.weights(before, name, heard)
            w, p = torch.tensor(list(weights.values())).double(), labels[[place[c] for c in weights]]
            counted = self._before(before, name, labels.shape[1])
            new = {"seen": w @ p, "adjusted": w @ mix_with_uniform(p, self.lam)}
            counts[name] = {k: counted[k] + x for k, x in new.items()}
        return replace(after, memory={**after.memory, self.slot: counts})

    def _before(self, state: ServerState, name: str, classes: int) -> Params:
        kept, model = state.memory.get(self.slot, {}), state.models[name]
        alike = [k for k in (name, *kept) if k in kept and k in state.models and state.models[k] is model]
        none = {k: torch.zeros(classes).double() for k in ("seen", "adjusted")}
        return kept[alike[0]] if alike else none


def taught(state: ServerState, slot: str = TAUGHT) -> dict[str, Tensor]:
    """The prior that each model's answers lean towards, if anything is known: no class is unheard of."""
    kept = state.memory.get(slot, {})
    if not any(float(counts["seen"].sum()) for counts in kept.values()):
        return {}
    left = {k: counts["seen"] / counts["adjusted"].clamp(min=1e-12) for k, counts in kept.items()}
    return {k: mix_with_uniform(x, 0.001).float() for k, x in left.items()}
