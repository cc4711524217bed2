"""FedAvg with fine-tuning: each client trains the global model a little further and keeps the result.

The baseline that personalised methods must beat. Every client fine-tunes whenever the fleet is
evaluated, always from the current global model; an inference-only client gets the global model.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.client.train import LocalTraining
from shoal.methods.fedavg import fedavg
from shoal.methods.setting import Setting
from shoal.methods.single import one_model_for, own_model_predict
from shoal.stages.personalise import Personalise
from shoal.types import Method


def fedavg_ft(s: Setting) -> Method:
    base = fedavg(s)
    tuning = s.training("personalise", LocalTraining, epochs=5, send=False, keep=True, name="personalise")
    stage = Personalise(tuning, one_model_for, rounds=s.rounds, every=s.eval_every)
    return replace(base, name="fedavg-ft", stages=(*base.stages, stage), predict=own_model_predict(s.model))
