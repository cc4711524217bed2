"""What the server makes of what returns from training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.client.prior import AdjustedTraining
from shoal.client.secure_aggregation import KEYS, SumTraining, TellKey
from shoal.methods.composition.builder import Draft, Piece
from shoal.methods.composition.coefficients import coefficients
from shoal.methods.pieces.represent import told_labels
from shoal.stages.balanced import TOLD
from shoal.stages.contribution import Coefficients, FederateByContribution
from shoal.stages.global_and_experts import FederateBeside
from shoal.stages.momentum import Momentum
from shoal.stages.query import AskOnce
from shoal.stages.secure_aggregation import FederateSums, Unmask
from shoal.stages.train import Federate, Rate

By = Literal["size", "contribution", "cosine"]


def mean(d: Draft) -> None:
    if d.measured:
        learned = d.coefficients or Coefficients(d.s.model, steps=0)
        by_contribution(d, "size", learned)
    elif d.models == "beside" or (d.models == "one" and adjusts(d)):
        head = by_class(d) if adjusts(d) else ()
        source = told_labels(d) if head else TOLD
        d.federate = d.s.make("train", FederateBeside, **common(d), head=head, source=source)
    else:
        if adjusts(d):
            d.notes += ("last layers are averaged as a whole: class by class only where all share one model",)
        remember = "summary" if d.has("select", "bandit") else "nothing"
        d.federate = d.s.make("train", Federate, **common(d), remember=remember)


def adjusts(d: Draft) -> bool:
    return isinstance(d.made["training"], AdjustedTraining)


@dataclass(frozen=True)
class ByClass:
    head: bool = True


def by_class(d: Draft) -> tuple[str, ...]:
    """What of a model is averaged class by class: with the adjusted loss its last layer."""
    return d.s.model.head if d.s.make("train", ByClass).head else ()


def contribution(d: Draft) -> None:
    by_contribution(d, "contribution", coefficients(d))


def cosine(d: Draft) -> None:
    by_contribution(d, "cosine", coefficients(d))


def by_contribution(d: Draft, by: By, learned: Coefficients) -> None:
    fixed = () if by == "size" else ("weighting",)
    reuse = d.has("personalise", "update")
    d.federate = d.s.make("train", FederateByContribution, fixed, **common(d), coefficients=learned, by=by, reuse=reuse)


@dataclass(frozen=True)
class Server:
    momentum: float = 0.7
    step: float = 1.0


def momentum(d: Draft) -> None:
    server = d.s.make("server", Server)
    mean(d)
    d.around = lambda train: Momentum(train, d.s.model.trainable, server.momentum, server.step)


def secure(d: Draft) -> None:
    if d.s.edges is not None:
        d.refuse("aggregate", "edges would have to be trusted with single updates: leave --edges out")
    least = d.s.make("secure", Least).least
    federate = d.s.make("train", FederateSums, ("least",), **common(d), least=least)
    program = SumTraining(d.made["training"], by_size=federate.weighting == "size")
    d.federate = replace(federate, program=program)
    d.stages["represent"].append(AskOnce(TellKey(), name=KEYS))
    d.stages["aggregate"].append(Unmask())


@dataclass(frozen=True)
class Least:
    least: int = 3  # clients in a sum


def common(d: Draft) -> dict[str, Any]:
    rate = d.s.make("train", Rate, lr=d.made["training"].lr, rounds=d.s.rounds)
    return {"program": d.program, "models_for": d.trains, "rate": rate, "trainable": d.s.model.trainable}


TRAINED = "what each client trained, and its number of rows"
ONE_MODEL = ("none", "aidc", "dbscan", "similar", "repulsive")  # cluster pieces with which a client trains one
PIECES = {
    "mean": Piece(
        mean,
        "McMahan et al. 2017; paper 000, Eq. 15; paper 001, Eq. 5; paper 002, Eq. 2",
        tells=TRAINED,
        single=False,
    ),
    "contribution": Piece(
        contribution,
        "paper 003, Eq. 12-13",
        sends="accuracy and loss on its own rows after training",
        tells=f"{TRAINED}, and how good it is; the last model of everybody is kept",
        needs={"cluster": ONE_MODEL},
        why="an update is compared with the one model that it set out from",
    ),
    "cosine": Piece(
        cosine,
        "paper 003, Eq. 14-15, Alg. 2",
        sends="accuracy and loss on its own rows after training",
        tells=f"{TRAINED}, and how good it is; the last model of everybody is kept",
        needs={"cluster": ONE_MODEL},
        why="an update is compared with the one model that it set out from",
    ),
    "secure": Piece(
        secure,
        "Bonawitz et al. 2017, pairwise masks, without shares of keys",
        sends="a public key, once; then what it trained under masks that cancel in the sum",
        keeps="a private key; of others in its sum the public ones",
        tells="nothing of single clients but whether they have rows: only the sum",
        needs={
            "cluster": ("none", "aidc", "dbscan", "similar", "repulsive"),
            "personalise": ("none", "fine-tune", "gate"),
        },
        why="the server has no single update",
        single=False,
    ),
    "momentum": Piece(
        momentum,
        "Hsu et al. 2019",
        tells=TRAINED,
        needs={"cluster": ("none", "similar", "repulsive", "shift")},
        why="a velocity goes on from round to round with a model that stays the same one",
        single=False,
    ),
}
