"""PFL-MoE: each client mixes the global model and one that it has tuned for itself, by a gate that sees the input.

Guo, Mei, Tang, PFL-MoE: Personalized federated learning based on mixture of experts, APWeb-WAIM 2021 (PFMoE in paper
001).

| paper | here |
|---|---|
| global model w_g by FedAvg | `methods.fedavg` |
| personal expert: w_g, its base frozen, its last layers tuned (PFL-FB) | `personal.*`: `LocalTraining`, the head |
| gate g(x), trained on rows held out from the tuning | `gate.*`: `client.gate`, on the validation rows |
| y = g · personal + (1 - g) · global, of logits | `client.gate.Gate` with one expert |

Every client tunes and trains its gate whenever the fleet is evaluated, always from the current global model; a client
without data is served the global model.

Deviation: in the authors' program the gate is one linear layer on the convolutions' features (PFL-MFE) or on the input
(PFL-MF), and a quarter of a client's rows are held out for it; here it is the small network that `scmoe` has, on the
input, and rows are those of `--val-share`, which nothing else trains on. There all dense layers are tuned, here the
last one.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.client.gate import FitGate, Gate, TrainGate, gated_predict
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import fedavg
from shoal.stages.personalise import Personalise
from shoal.types import Method


def pfmoe(setting: Setting) -> Method:
    base = fedavg(setting)
    personal_training = setting.make_training("personal", LocalTraining, epochs=5, part="head", group="personal")
    gate = setting.make("gate", Gate, ("top", "shortlist"), calibrate=False)  # of one expert there is no choice
    program = TrainGate(
        setting.make("gate", FitGate, model=setting.model, gate=gate, split="val"), personal_training, choice=None
    )
    stage = Personalise(program, one_model_for, rounds=setting.rounds, every_rounds=setting.eval_every)
    return replace(base, name="pfmoe", stages=(*base.stages, stage), predict=gated_predict(setting.model, gate))
