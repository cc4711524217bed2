"""FedProx: FedAvg with a term in the local loss that pulls towards the received model.

Li et al., Federated optimization in heterogeneous networks, MLSys 2020.

| paper | here |
|---|---|
| h_k(w) = F_k(w) + μ/2 |w - w^t|² (Eq. 2) | `train.mu` of `client.train.LocalTraining` |

Deviations from the paper
-------------------------
- Inexact solutions: the paper lets slow clients train for fewer epochs. Here all clients train for `train.epochs`
  epochs.
"""

from __future__ import annotations

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method, select_at_random
from shoal.types import Method


def fedprox(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return one_model_method(setting, "fedprox", *select_at_random(setting), mu=0.1)
