"""What a client is answered with, those who never trained among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal import tree
from shoal.client.ensemble import Confidence, ensemble_predict, ensemble_route
from shoal.client.gate import Gate
from shoal.client.mixture import corrected_predict
from shoal.client.moments import FeatureMoments
from shoal.client.prior import PRIOR, AdjustedTraining, EstimatePrior
from shoal.methods.draft import Draft, Piece
from shoal.methods.pieces.prior import alpha, count_labels
from shoal.methods.pieces.represent import told_labels
from shoal.methods.single import one_model_init
from shoal.stages.describe import LABELS, Describe, served_by
from shoal.stages.momentum import RunningMean, averaged
from shoal.stages.taught import Taught, taught
from shoal.types import ClientId, Params, Predict, ServerState, Tree


def plain(d: Draft) -> None:
    """As it was trained or personalised."""


def confidence(d: Draft) -> None:
    s, rule = d.s, d.s.make("serve", Confidence)
    dense, split = rule.rule == "density", d.made["split"]
    if (dense or rule.mask == "read") and not d.has("represent", "last-layer"):
        field, value = ("rule", rule.rule) if dense else ("mask", rule.mask)
        d.refuse("serve", f"serve.{field} is {value!r}, which needs the first round's models: represent=last-layer")
    if dense:
        d.stages["serve"].append(Describe(FeatureMoments(s.model, rule.width, split)))
        d.init, d.first_models = _describable(d, rule), True
    told = told_labels(d) if rule.mask == "told" else LABELS
    answer = ensemble_predict(s.model, rule)
    personal = None if d.has("personalise", "none") else d.predict
    d.serves, d.route = served_by(s.model, rule, told), ensemble_route(s.model, rule)
    d.predict = answer if personal is None else own_or(personal, answer)


def _describable(d: Draft, rule: Confidence) -> Callable[[int], ServerState]:
    """A network that rows cannot be described by is refused before any client is asked."""
    first = d.init or one_model_init(d.s.model)

    def init(seed: int) -> ServerState:
        state = first(seed)
        model = next(iter(state.models.values()))
        d.s.model.features(model, torch.zeros(2, *d.s.model.input_shape, device=d.s.model.device), rule.width)
        return state

    return init


def own_or(personal: Predict, others: Predict) -> Predict:
    """Whoever keeps a model of its own answers by what it has made of it."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return (personal if "model" in private else others)(models, private, x)

    return predict


@dataclass(frozen=True)
class Average:
    average: float = 0.8


def average(d: Draft) -> None:
    d.stages["serve"].insert(0, RunningMean(d.s.make("server", Average).average))
    inside = d.served

    def serves(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        return inside(replace(state, models=averaged(state)), client)

    d.serves = serves


def prior(d: Draft) -> None:
    count_labels(d)
    gate, inside, device = d.made.get("gate", Gate()), d.served, d.s.model.device
    told = any(stage.name == LABELS for stage in d.stages["represent"])
    if told or d.has("represent", "labels"):
        training = d.made["training"]
        lam = training.lam if isinstance(training, AdjustedTraining) else 1.0
        around, source = d.around, told_labels(d)
        d.around = lambda train: Taught(around(train) if around else train, train, lam, source)

    def serves(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        models, lean = inside(state, client), taught(state)
        return tree.to({**models, **({PRIOR: {k: lean[k] for k in models}} if lean else {})}, device)

    d.serves, d.predict = serves, corrected_predict(d.s.model, gate, alpha(d))
    d.adapt = d.s.make("estimate", EstimatePrior, model=d.s.model)


PIECES = {
    "plain": Piece(plain, "-", single=False),
    "confidence": Piece(
        confidence,
        "paper 004, Alg. 3",
        sends="nothing; with serve.rule=density sums over its rows of features and their products",
        keeps="an unseen client: the models of all clusters",
        tells="with serve.mask=told how often each label occurs with each client",
        needs={"cluster": ("aidc", "dbscan")},
        why="the surest of several models answers, and without clusters there is one",
        single=False,
    ),
    "prior": Piece(
        prior,
        "Saerens et al. 2002",
        keeps="its label counts, or what it takes for them; what models were taught, if label distributions are told",
        needs={"cluster": ("none", "similar", "repulsive", "shift"), "personalise": ("none", "gate")},
        why="what is corrected are answers of the global model",
        single=False,
    ),
    "average": Piece(
        average,
        "shoal's own",
        keeps="the running mean of the models",
        needs={"cluster": ("none", "similar", "repulsive", "shift")},
        why="a mean over rounds is of a model that stays the same one, and clusters that are found anew change theirs",
        single=False,
    ),
}
