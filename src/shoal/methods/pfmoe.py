"""PFL-MoE: each client mixes the global model and its fine-tuned one by a gate that depends on the input.

Guo, Mei, Tang, PFL-MoE: Personalized federated learning based on mixture of experts, APWeb-WAIM 2021 (PFMoE in paper
001).

| paper | here |
|---|---|
| global model w_g by FedAvg | `methods.fedavg` |
| personal expert: w_g, its base frozen, its last layers tuned (PFL-FB) | `personal.*`: `LocalTraining`, the head |
| gate g(x), trained on held-out samples | `gate.*`: `client.gate`, on the validation samples |
| y = g · personal + (1 - g) · global, of logits | `client.gate.Gate` with one expert |

Every client trains its head and its gate whenever the fleet is evaluated, always from the current global model. A
client without samples is served the global model.

Deviations from the paper
-------------------------
- Gate: in the authors' program it is one linear layer on the features of the convolutions (PFL-MFE) or on the input
  (PFL-MF). Here it is the small network of `scmoe`, on the input.
- Held-out samples: the authors hold out a quarter of a client's samples. Here they are the validation samples
  (`--val-fraction`), on which nothing else trains.
- Personal layers: the authors tune all dense layers. Here the last layer is tuned.
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
    """Builds the method with the options of the setting."""
    base = fedavg(setting)
    personal_training = setting.make_training("personal", LocalTraining, epochs=5, part="head", name="personal")
    gate = setting.make("gate", Gate, ("top", "shortlist"), calibrate=False)  # with one expert there is no choice
    program = TrainGate(
        setting.make("gate", FitGate, model=setting.model, gate=gate, split="val"), personal_training, choice=None
    )
    stage = Personalise(program, one_model_for, rounds=setting.rounds, every_rounds=setting.eval_every)
    return replace(base, name="pfmoe", stages=(*base.stages, stage), predict=gated_predict(setting.model, gate))
