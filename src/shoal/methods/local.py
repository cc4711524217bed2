"""Local: every client for itself, no federation: what a client has without the others.

The cohort of each round trains its own models further, so that a run costs as many client-epochs as
FedAvg with the same flags; `--cohort 1.0` trains all. Nothing is shared, so an inference-only client
can be served only the untrained first model: its central accuracy is that of chance.
"""

from __future__ import annotations

import torch

from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for, own_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import by_chance
from shoal.rng import derive_seed
from shoal.stages.train import LearningRate, TrainLocally
from shoal.types import Method, ServerState


def local(s: Setting) -> Method:
    program = s.training("train", LocalTraining, start="own", send=False, keep=True)
    rate = s.make("train", LearningRate, lr=program.lr, rounds=s.rounds)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        return ServerState(0, {"global": s.model.init(first)}, memory={"train": {"first": torch.tensor(first)}})

    return Method(
        name="local",
        init=init,
        stages=(*by_chance(s), TrainLocally(program, rate)),
        models_for=one_model_for,
        predict=own_model_predict(s.model),
        num_classes=s.model.num_classes,
    )
