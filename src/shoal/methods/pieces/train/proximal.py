"""SGD with a proximal term, as in FedProx."""

from __future__ import annotations

from shoal.client.train import LocalTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import TRAINING_METRICS
from shoal.methods.composition.client_training import set_training
from shoal.methods.composition.piece import Piece, register


@register("train", "proximal")
class Proximal(Piece):
    """Trains by SGD with a proximal term of weight train.mu that pulls towards the received model."""

    source = "Li et al. 2020 (FedProx); Tang et al. 2025 (FedEPC), Eq. 13-14"
    provides = (TRAINING_METRICS,)
    client_sends = "the model that it trained"
    client_keeps = "the received model"

    def add_to(self, method: MethodBuilder) -> None:
        set_training(method, LocalTraining, mu=0.1)
