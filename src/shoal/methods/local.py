"""Local: every client trains its own model without federation, which shows what a client achieves without the others.

The cohort of each round trains its personal models further, so that a run costs as many client-epochs as FedAvg with
the same flags. `--cohort 1.0` trains all clients. Nothing is shared, so an unseen client can only be served the
untrained first model: the central accuracy is that of random predictions.
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
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", LocalTraining, start="own", sends_model=False, keeps_model=True)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)

    def init(seed: int) -> ServerState:
        first_seed = derive_seed(seed, "init")
        first_model = setting.model.init(first_seed)
        return ServerState(0, {"global": first_model}, memory={"train": {"first": torch.tensor(first_seed)}})

    return Method(
        name="local",
        init=init,
        stages=(*select_at_random(setting), TrainLocally(program, rate)),
        models_for=one_model_for,
        predict=personal_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
