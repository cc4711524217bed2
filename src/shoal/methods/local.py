"""Local: every client for itself, no federation: what a client has without the others.

The cohort of each round trains its own models further, so that a run costs as many client-epochs as
FedAvg with the same flags; `--cohort 1.0` trains all. Nothing is shared, so an inference-only client
can be served only the untrained first model: its central accuracy is that of chance.
"""

from __future__ import annotations

import torch

from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for, personal_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.rng import derive_seed
from shoal.stages.train import LearningRate, TrainLocally
from shoal.types import Method, ServerState


def local(setting: Setting) -> Method:
    program = setting.make_training("train", LocalTraining, start="own", send=False, keep=True)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        return ServerState(0, {"global": setting.model.init(first)}, memory={"train": {"first": torch.tensor(first)}})

    return Method(
        name="local",
        init=init,
        stages=(*select_at_random(setting), TrainLocally(program, rate)),
        models_for=one_model_for,
        predict=personal_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
