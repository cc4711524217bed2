"""SGD on logits that are adjusted by the client's class prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from shoal.client.prior import AdjustedTraining
from shoal.client.train import LocalTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import LABEL_DISTRIBUTIONS
from shoal.methods.composition.client_training import set_training
from shoal.methods.composition.label_prior import count_labels
from shoal.methods.composition.piece import Piece, register
from shoal.models import Model
from shoal.types import option


@register("train", "adjusted")
@dataclass(frozen=True)
class LogitAdjusted(Piece):
    """Trains by SGD on logits adjusted by the client's class prior, which reduces drift between clients."""

    source = "shoal"
    uses = (LABEL_DISTRIBUTIONS,)
    client_sends = "the model that it trained"
    client_keeps = "the received model and its label counts"

    logit_adjustment: Literal["auto", "on", "off"] = option(
        "auto",
        "Adjust the logits in training by the class prior (on), or not (off). With auto they are adjusted if clients "
        "train for several epochs or the model has convolutions, because clients then drift apart within a round.",
    )

    def add_to(self, method: MethodBuilder) -> None:
        setting = method.setting
        if self._adjusts_logits(setting.model, setting.make_training("train", AdjustedTraining).epochs):
            count_labels(method)
            set_training(method, AdjustedTraining)
        else:
            unless = "logits are adjusted, as with train.logit_adjustment=on"
            setting.mark_without_effect("train", "uniform_mix", "classwise_head", unless=unless)
            setting.mark_without_effect("prior", "every_rounds", unless=unless)  # where no other piece counts labels
            set_training(method, LocalTraining)

    def _adjusts_logits(self, model: Model, epochs: int) -> bool:
        if self.logit_adjustment == "auto":
            return epochs > 1 or model.uses(torch.nn.modules.conv._ConvNd)
        return self.logit_adjustment == "on"
