"""FedProx: FedAvg with a pull towards the received model in the local objective.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020.

| paper | here |
|---|---|
| h_k(w) = F_k(w) + μ/2 |w - w^t|² (Eq. 2) | `train.mu` of `client.train.LocalTraining` |

Deviation: slow clients are not given fewer epochs (the paper's inexact solutions); all do `train.epochs`.
"""

from __future__ import annotations

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method, select_at_random
from shoal.types import Method


def fedprox(setting: Setting) -> Method:
    return one_model_method(setting, "fedprox", *select_at_random(setting), mu=0.1)
