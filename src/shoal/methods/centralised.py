"""Centralised: one model is trained on the data of all clients: an upper bound, not federated learning.

A round is `train.epochs` epochs over the pooled training samples of all clients. The method runs only in simulations,
because a real fleet has no place that holds the data of all clients.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.select import SelectCentralised
from shoal.types import Method


def centralised(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    method = one_model_method(
        setting, "centralised", SelectCentralised(), fixed_keys=("sensitivity", "weighting")
    )  # pooled samples are not divided by sensitivity
    return replace(method, uses_cohort_size=False)
