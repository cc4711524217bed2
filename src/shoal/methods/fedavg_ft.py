"""FedAvg with fine-tuning: each client trains the global model a little further and keeps the result.

The baseline that personalised methods must beat. Every client fine-tunes whenever the fleet is
evaluated, always from the current global model; an inference-only client gets the global model.

`personalise.part=head` trains the last layer only. `personalise.tune=true` has the fleet choose step and passes first:
every client tries all of `personalise.rates` and `personalise.passes` and tells how many of its validation rows each
gets right; the candidate with most hits over all clients is what everybody then fine-tunes with.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method


def fedavg_ft(setting: Setting) -> Method:
    return compose(setting, "fedavg-ft", {"personalise": "fine-tune"})
