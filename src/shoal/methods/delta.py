"""DELTA: clients whose gradients differ from the others', or vary much, are drawn more often and weigh less.

Wang, Guo, Lin, Tang, DELTA: diverse client sampling for fasting federated learning, NeurIPS 2023; a baseline of
paper 002.

| paper | here |
|---|---|
| g_i, σ_i | `client.probe.GradientProbe`, once for everybody, charged as preparation; then from each training |
| p_i ∝ √(α₁ ζ_i² + α₂ σ_i²) | `selectors.diversity.probabilities`, `select.alpha1`, `select.alpha2` |
| weight w_i / (K p_i) | `selectors.diversity.importance`, scaled to sum to 1 |

Deviation: gradients of a round's training stand for those of the next rounds, as the authors propose, so that not
everybody has to send one every round; σ_i stays that of the probe.
"""

from __future__ import annotations

from shoal.client.probe import GradientProbe
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.query import QueryClients
from shoal.stages.train import LearningRate
from shoal.stages.update_selection import PROBE_STAGE, SelectByGradientDiversity
from shoal.types import Method


def delta(setting: Setting) -> Method:
    training = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    ask = QueryClients(GradientProbe(setting.model, training.batch_size), one_model_for, name=PROBE_STAGE)
    stage_fields = {
        "rate": rate,
        "epochs": training.epochs,
        "batch_size": training.batch_size,
        "momentum": training.momentum,
    }
    choose = setting.make("select", SelectByGradientDiversity, **stage_fields)
    return one_model_method(setting, "delta", ask, choose, remember="update", weights_from="select")
