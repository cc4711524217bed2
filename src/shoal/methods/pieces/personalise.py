"""What each client makes of the models it is served, and keeps to itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.client.choose import Choose
from shoal.client.gate import FitGate, Gate, TrainGate, gated_predict
from shoal.client.mixture import WeighModels, corrected_predict
from shoal.client.train import LocalTraining
from shoal.client.update import ConditionalUpdate
from shoal.methods.draft import Draft, Piece
from shoal.methods.pieces import tuning
from shoal.methods.pieces.prior import alpha
from shoal.methods.single import own_model_predict
from shoal.stages.beside import PersonaliseMembers
from shoal.stages.contribution import Kappa, Update
from shoal.stages.overlap import experts_for
from shoal.stages.personalise import Personalise


@dataclass(frozen=True)
class Private:
    start: Literal["warm", "cold"] = "warm"


class OwnModel(NamedTuple):
    training: LocalTraining
    start: Literal["warm", "cold"]


def own_training(d: Draft) -> OwnModel:
    """How a client's own model is trained: from its best expert when it is needed, or on from round to round."""
    start = d.s.make("private", Private).start
    epochs = 5 if start == "warm" else d.s.epochs
    return OwnModel(d.s.training("private", LocalTraining, epochs=epochs, start="own", name="private"), start)


def fine_tune(d: Draft) -> None:
    if d.models in ("overlapping", "beside"):
        cluster = d.chosen["cluster"]
        d.refuse("personalise", f"with cluster={cluster} a client is served several models, and it goes on from one")
    if d.has("serve", "average"):
        d.own = lambda served: tuning.stages(d.s, served)
    else:
        d.stages["personalise"] += tuning.stages(d.s, d.served)
    d.predict = own_model_predict(d.s.model, d.predict)


def gate(d: Draft) -> None:
    if d.models == "beside":
        return gate_beside(d)
    own, weighing = own_training(d), d.s.make("gate", Gate)
    if own.start == "cold" and d.models != "overlapping":
        d.refuse("personalise", "private.start is 'cold', which is for cluster=mctc only: it must be 'warm'")
    choice = Choose(d.s.model, "hits", d.made["judged"]) if d.models == "overlapping" else None
    fit = d.s.make("gate", FitGate, model=d.s.model, gate=weighing)
    program = TrainGate(fit, own.training, choice, own.start)
    d.stages["personalise"].append(Personalise(program, experts_for, d.s.rounds, d.s.eval_every, reuse=True))
    d.serves, d.predict = experts_for, gated_predict(d.s.model, weighing)
    return None


def gate_beside(d: Draft) -> None:
    """Over the global model and all experts, as they are served; there is no model of one's own."""
    weighing = d.s.make("gate", Gate, top=0, shortlist=0, calibrate=False)
    fit = d.s.make("gate", FitGate, model=d.s.model, gate=weighing)
    prior = d.has("serve", "prior")
    program = WeighModels(fit, alpha(d) if prior else 1.0, prior)
    d.own = lambda served: (PersonaliseMembers(program, served, d.s.rounds, d.s.eval_every),)
    d.made["gate"] = weighing
    d.predict = corrected_predict(d.s.model, weighing, 1.0, prior=False)


def update(d: Draft) -> None:
    program = d.s.make("update", ConditionalUpdate, model=d.s.model, rows=d.made["training"].rows)
    kappa = d.s.make("update", Kappa, rounds=d.s.rounds)
    d.stages["personalise"].append(Update(program, d.trains, kappa))
    d.predict = own_model_predict(d.s.model, d.predict)


PIECES = {
    "none": Piece(lambda d: None, "-", single=False),
    "fine-tune": Piece(fine_tune, "the baseline of all", keeps="the model that it trained further", single=False),
    "gate": Piece(
        gate,
        "paper 001, Alg. 2",
        keeps="a model of its own (not with cluster=shift), and a gate over it and its experts",
        needs={"cluster": ("aidc", "dbscan", "mctc", "shift")},
        why="a gate weighs experts, and without clusters there are none",
        single=False,
    ),
    "update": Piece(
        update,
        "paper 003, Eq. 16, Alg. 3",
        keeps="a model of its own, mixed with what it is sent where that is worse on its validation rows",
        needs={"cluster": ("none",)},
        why="what it keeps must come from the one model that all share",
        single=False,
    ),
}
