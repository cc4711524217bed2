"""The personal model after a new global model arrives: the received one, or a mix of both (APCSMA, Eq. 16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.models import Model
from shoal.types import Batch, Params, Phase, Report, Task, Tree, option


@dataclass(frozen=True)
class ConditionalUpdate:
    """Replaces the personal model by the received one, or mixes the two if the personal model has more hits.

    The task's config has the weight "kappa" of the personal model in the mix. Hits are correct predictions on the
    client's validation or training samples, all or those of one sensitivity. A client without such samples takes the
    received model. Predictions that are not finite are no hits.
    """

    model: Model
    validation_split: Literal["val", "train"] = option(
        "val",
        "Compare the personal and the received model on the client's validation samples (val) or on its training "
        "samples (train).",
        value_without_validation="train",
    )
    sensitivity: Literal["all", "low", "high"] = "all"  # of the samples that the client trains on
    name: str = "update"
    batchable: bool = True  # predictions of a sample do not depend on other samples

    @property
    def split(self) -> str:
        """The name of the split on which both models are compared."""
        return self.validation_split if self.sensitivity == "all" else f"{self.validation_split}/{self.sensitivity}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        hits = torch.zeros(2, device=self.model.device)
        return {"received": received, "own": private.get("model", received), "hits": hits}

    def step(self, state: Tree, batch: Batch) -> Tree:
        logits = torch.stack([self.model.predict(state[k], batch.x) for k in ("own", "received")])
        is_finite = logits.isfinite().all(-1)  # argmax of NaNs would be the first class
        is_correct = (logits.argmax(-1) == batch.y) & is_finite
        return state | {"hits": state["hits"] + (is_correct * batch.w).sum(-1)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        is_personal_better = state["hits"][0] > state["hits"][1]
        model = mix_models(state["received"], state["own"], task.config["kappa"], is_personal_better)
        return Report(metrics={"kept": (float(is_personal_better), float(counts[self.split] > 0))}), {"model": model}


def mix_models(received: Params, personal: Params, kappa: float, is_personal_better: Tensor) -> Params:
    """Returns the updated personal model by Eq. 16. Whole numbers (batch counters) are the received ones."""
    return {
        k: torch.where(is_personal_better, (1 - kappa) * x + kappa * personal[k], x) if x.is_floating_point() else x
        for k, x in received.items()
    }
