"""Ditto: FedAvg, and every client also trains a personal model that is pulled towards the global one.

Li, Hu, Beirami, Smith, Ditto: fair and robust federated learning through personalization, ICML 2021, Algorithm 1 with
FedAvg for the global model.

| paper | here |
|---|---|
| S_t, the clients of a round | `--cohort`: `stages.select.SelectRandom` |
| w_k ← UPDATE_GLOBAL(w^t, ∇F_k) | `train.*`: `client.train.LocalTraining` |
| h_k(v; w) = F_k(v) + λ/2 |v - w|² | λ is `personal.mu` |
| s steps v_k ← v_k - η (∇F_k(v_k) + λ (v_k - w^t)) | `personal.*`: `client.personal_models.TrainSharedAndPersonal` |
| w^{t+1} ← AGGREGATE(w^t, w_k - w^t) | `stages.train.TrainAndAggregate` |

The personal model of a client starts as the global model of the first round in which the client trains. In each round
it is pulled towards the global model of that round. A client is served its personal model. A client that has never
trained is served the global model, which is equal to the model of FedAvg, byte for byte: a personal model never
influences it.

Deviations from the paper
-------------------------
- Weights: clients are weighted by their number of samples, as in FedAvg. The authors' program weights all clients
  equally (`train.weighting=uniform`).
- Order of training: in the authors' program both models train on the same batches in turn. Here the global model trains
  for all its epochs before the personal model does, and the personal model has its own order of samples.
- Options: those of `personal` have the values of `train` by default, but the learning rate of the personal model is the
  same in all rounds.
- λ: it is the same for all clients. Clients do not choose it on validation samples.
"""

from __future__ import annotations

from shoal.client.personal_models import TrainSharedAndPersonal
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, personal_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method


def ditto(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    shared = setting.make_training("train", LocalTraining)
    personal_fields = {"mu": 0.1, "start": "own", "name": "personal"}
    program = TrainSharedAndPersonal(
        shared, personal=setting.make_training("personal", LocalTraining, **vars(shared) | personal_fields)
    )
    rate = setting.make("train", LearningRate, lr=shared.lr, rounds=setting.rounds)
    return Method(
        name="ditto",
        init=one_model_init(setting.model),
        stages=(
            *select_at_random(setting),
            setting.make("train", TrainAndAggregate, program=program, models_for=one_model_for, rate=rate),
        ),
        models_for=one_model_for,
        predict=personal_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
