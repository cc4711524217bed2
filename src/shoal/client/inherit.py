"""Training with distillation from a personal model that the client keeps from earlier rounds (FedPHP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.client.train import LocalTraining
from shoal.types import Batch, OnlyIf, Params, Report, Task, Tree, option


@dataclass(frozen=True)
class InheritedTraining(LocalTraining):
    """Local training with distillation from the personal model, into which the trained model is then averaged.

    The fraction of the old personal model in the average grows in proportion to the number of tasks, up to `inherit`
    after as many tasks as the config's "planned". A client without a personal model uses the received model as teacher.
    """

    transfer: float = option(
        0.1,
        "Distillation from the client's personal model has this weight in the loss. The labels have the "
        "remaining weight.",
        ge=0,
        le=1,
    )
    temperature: float = option(
        4.0,
        "Divide the personal model's logits by this temperature before the trained model imitates them.",
        gt=0,
        only_if=OnlyIf("train.transfer is above 0", lambda training: training.transfer > 0),
    )
    inherit: float = option(
        0.9,
        "Keep at most this fraction of the old personal model when the newly trained one is averaged into it. The "
        "fraction grows each time the client is in the cohort.",
        ge=0,
        le=1,
    )

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        times = private.get("times", torch.zeros((), device=self.model.device))
        return super().begin(task, private) | {"private": private.get("model", received), "times": times}

    def add_penalties(self, loss: Tensor, logits: Tensor, params: Params, state: Tree, batch: Batch) -> Tensor:
        if self.transfer:
            teacher_probabilities = (self.model.predict(state["private"], batch.x) / self.temperature).softmax(-1)
            distillation_loss = -(
                (teacher_probabilities * F.log_softmax(logits, dim=-1)).sum(-1) * batch.w
            ).sum() / batch.w.sum().clamp(min=1)
            loss = (1 - self.transfer) * loss + self.transfer * distillation_loss
        return super().add_penalties(loss, logits, params, state, batch)

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = super().end(task, state, counts)
        mu = self.inherit * min(1.0, float(state["times"]) / task.config["planned"])
        return report, {
            "model": mix_models(state["private"], self.current_model(state), mu),
            "times": state["times"] + 1,
        }


def mix_models(old: Params, new: Params, mu: float) -> Params:
    """Returns `mu` * old + (1 - `mu`) * new. Whole numbers (batch counters) are the new ones."""
    return {k: mu * old[k] + (1 - mu) * x if x.is_floating_point() else x for k, x in new.items()}
