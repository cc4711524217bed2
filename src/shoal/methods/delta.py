"""DELTA: clients whose gradients vary much or differ from the others are drawn more often and weigh less.

Wang, Guo, Lin, Tang, DELTA: diverse client sampling for fasting federated learning, NeurIPS 2023; a baseline of paper
002.

| paper | here |
|---|---|
| g_i, σ_i | `client.probe.GradientProbe`, once for every client, charged as preparation; then the updates of training |
| p_i ∝ √(α₁ ζ_i² + α₂ σ_i²) | `selectors.diversity.probabilities`, `select.alpha1`, `select.alpha2` |
| weight w_i / (K p_i) | `selectors.diversity.importance_weights`, scaled to sum to 1 |

Deviations from the paper
-------------------------
- Gradients: the updates of a round stand for the gradients of the next rounds, as the authors propose, so that not
  every client has to send a gradient in every round. σ_i stays the value of the first probe.
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
    """Builds the method with the options of the setting."""
    training = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    probe = QueryClients(GradientProbe(setting.model, training.batch_size), one_model_for, name=PROBE_STAGE)
    stage_fields = {
        "rate": rate,
        "epochs": training.epochs,
        "batch_size": training.batch_size,
        "momentum": training.momentum,
    }
    select = setting.make("select", SelectByGradientDiversity, **stage_fields)
    return one_model_method(setting, "delta", probe, select, remember="update", weights_from="select")
