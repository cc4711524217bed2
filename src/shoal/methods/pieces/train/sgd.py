"""Stochastic gradient descent, as in FedAvg."""

from __future__ import annotations

from shoal.client.train import LocalTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import TRAINING_METRICS
from shoal.methods.composition.client_training import set_training
from shoal.methods.composition.piece import Piece, register


@register("train", "sgd")
class Sgd(Piece):
    """Trains by SGD on the client's training samples for some epochs."""

    is_default = True
    source = "McMahan et al. 2017"
    provides = (TRAINING_METRICS,)
    client_sends = "the model that it trained"
    client_keeps = "the received model"

    def add_to(self, method: MethodBuilder) -> None:
        set_training(method, LocalTraining)
