"""What a client does with the model that it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.client.model_choice import ChooseAndTrain
from shoal.client.multi_model import TrainEach
from shoal.client.personal_models import TrainBoth
from shoal.client.prior import AdjustedTraining
from shoal.client.train import LocalTraining
from shoal.client.training_metrics import MeasuredTraining
from shoal.methods.composition.builder import Draft, Piece
from shoal.methods.composition.label_prior import count_labels
from shoal.methods.pieces.personalise import own_training
from shoal.models import Model


@dataclass(frozen=True)
class Judging:
    judge: Literal["val", "train"] = "val"  # rows on which a client compares its experts


def sgd(d: Draft) -> None:
    lay(d, LocalTraining)


def proximal(d: Draft) -> None:
    lay(d, LocalTraining, mu=0.1)


@dataclass(frozen=True)
class Adjusting:
    adjust: Literal["auto", "on", "off"] = "auto"

    def __call__(self, model: Model, epochs: int) -> bool:
        """By itself where clients drift apart within a round: with several epochs, and with convolutions."""
        if self.adjust == "auto":
            return epochs > 1 or model.uses(torch.nn.modules.conv._ConvNd)
        return self.adjust == "on"


def adjusted(d: Draft) -> None:
    if d.measured:
        d.refuse("train", "contributions are measured, and own models kept, with the plain loss: it must be sgd")
    if d.s.make("train", Adjusting)(d.s.model, d.s.training("train", AdjustedTraining).epochs):
        count_labels(d)
        lay(d, AdjustedTraining)
    else:
        lay(d, LocalTraining)


def lay(d: Draft, training: type[LocalTraining], **defaults: Any) -> None:
    kept = {"start": "own", "keep": True} if d.has("personalise", "update") else {}
    made = d.s.training("train", MeasuredTraining if d.measured else training, **defaults, **kept)
    d.made |= {"training": made, "split": made.split}
    d.program = made
    if d.models == "beside":
        d.program = TrainEach(made)
    if d.models == "overlapping":
        judge = d.s.make("train", Judging).judge
        d.made["judged"] = judge if made.rows == "all" else f"{judge}/{made.rows}"
        d.program = ChooseAndTrain(made, "hits", d.made["judged"])
        own = own_training(d) if d.has("personalise", "gate") else None
        if own is not None and own.start == "cold":
            d.program = TrainBoth(d.program, own.training)


PIECES = {
    "sgd": Piece(sgd, "McMahan et al. 2017", sends="what it trained", keeps="the model that it is sent", single=False),
    "proximal": Piece(
        proximal,
        "paper 000, Eq. 13-14",
        sends="what it trained",
        keeps="the model that it is sent",
        single=False,
    ),
    "adjusted": Piece(
        adjusted,
        "shoal's own",
        sends="what it trained",
        keeps="the model that it is sent, and its label counts",
        single=False,
    ),
}
