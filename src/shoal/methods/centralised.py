"""Centralised: one model trained on everybody's data in one place: the upper bound, not federated learning.

A round is `epochs` passes over the pooled training data of all clients. It runs in simulation only:
a real fleet has no place where the data meet.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.select import SelectCentralised
from shoal.types import Method


def centralised(setting: Setting) -> Method:
    method = one_model_method(
        setting, "centralised", SelectCentralised(), fixed_keys=("rows", "weighting")
    )  # the pool has no sensitive part
    return replace(method, uses_cohort_size=False)
