"""x"""
from __future__ import annotations

import torch

from shoal.client.ensemble import Confidence, said_by
from shoal.client.train import LocalTraining
from shoal.methods.setting import Setting
from shoal.rng import derive_seed
from shoal.stages.ensemble import FIRST, InTurn, Neighbours, TrainApart, ensemble_for, trained_by
from shoal.stages.experts import numbered
from shoal.stages.train import Federate, Rate
from shoal.types import Method, ServerState


def fce(s: Setting) -> Method:
    program = s.training("train", LocalTraining)
    rate = s.make("train", Rate, lr=program.lr, rounds=s.rounds)
    train = s.make("train", Federate, program=program, models_for=trained_by(s.model), rate=rate)
    confidence = s.make("serve", Confidence)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        return ServerState(0, numbered([s.model.init(first)]), memory={FIRST: {"seed": torch.tensor(first)}})

    def route(models, private, x):
        return confidence.answer(said_by(s.model, models, x))

    return Method(
        name="fce",
        init=init,
        stages=(s.make("select", InTurn), TrainApart(train, s.make("cluster", Neighbours), s.model)),
        models_for=ensemble_for,
        predict=lambda m, p, x: route(m, p, x).logits,
        route=route,
        classes=s.model.classes,
    )
