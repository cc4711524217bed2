"""What a client does with the model that it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shoal.client.choose import ChooseAndTrain
from shoal.client.measure import MeasuredTraining
from shoal.client.personal import TrainBoth
from shoal.client.prior import AdjustedTraining
from shoal.client.train import LocalTraining
from shoal.methods.draft import Draft, Piece
from shoal.methods.pieces.personalise import own_training
from shoal.methods.pieces.prior import count_labels


@dataclass(frozen=True)
class Judging:
    judge: Literal["val", "train"] = "val"  # rows on which a client compares its experts


def sgd(d: Draft) -> None:
    lay(d, LocalTraining)


def proximal(d: Draft) -> None:
    lay(d, LocalTraining, mu=0.1)


def adjusted(d: Draft) -> None:
    if d.measured:
        d.refuse(
            "train", "what a contribution is measured by, and a client's own model, are of the plain loss: use sgd"
        )
    count_labels(d)
    lay(d, AdjustedTraining)


def lay(d: Draft, training: type[LocalTraining], **defaults: Any) -> None:
    kept = {"start": "own", "keep": True} if d.has("personalise", "update") else {}
    made = d.s.training("train", MeasuredTraining if d.measured else training, **defaults, **kept)
    d.made |= {"training": made, "split": made.split}
    d.program = made
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
