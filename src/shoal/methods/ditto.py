"""Ditto: FedAvg, and beside it every client trains a model of its own that is pulled towards the global one.

Li, Hu, Beirami, Smith, Ditto: fair and robust federated learning through personalization, ICML 2021, Algorithm 1 with
FedAvg for the global model.

| paper | here |
|---|---|
| S_t, the clients of a round | `--cohort`: `stages.select.Random` |
| w_k ← UPDATE_GLOBAL(w^t, ∇F_k) | `train.*`: `client.train.LocalTraining` |
| h_k(v; w) = F_k(v) + λ/2 |v - w|² | λ is `personal.mu` |
| s steps v_k ← v_k - η (∇F_k(v_k) + λ (v_k - w^t)) | `personal.*`: `client.personal_models.TrainBoth` |
| w^{t+1} ← AGGREGATE(w^t, w_k - w^t) | `stages.train.Federate` |

A client's own model starts as the global one that it is sent when it first takes part, and is pulled towards the one
that it is sent in each round. It is what the client is served; who never took part is served the global model, which is
FedAvg's to the byte: what is personal never flows back.

Deviation: clients weigh by their rows, as in FedAvg; the authors' program weighs all alike (`train.weighting=uniform`).
There both models take their steps on the same batches in turn; here the global model makes all its passes before the
own one does, in an order of rows of its own. Options of `personal` are by default those of `train`, but its rate is the
same in all rounds. λ is one number for all: clients do not choose it on validation data.
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
    shared = setting.make_training("train", LocalTraining)
    own = {"mu": 0.1, "start": "own", "name": "personal"}
    program = TrainSharedAndPersonal(
        shared, personal=setting.make_training("personal", LocalTraining, **vars(shared) | own)
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
