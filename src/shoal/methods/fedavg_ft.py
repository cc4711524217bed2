"""FedAvg with fine-tuning: each client trains the global model a little further and keeps the result.

This is the baseline that personalised methods must beat. Every client fine-tunes whenever the fleet is evaluated,
always from the current global model. An unseen client is served the global model.

With `personalise.part=head` only the last layer is trained. With `personalise.search=true` the fleet first chooses the
learning rate and the number of epochs. Every client tries all values of `personalise.lr_grid` and
`personalise.epochs_grid` and reports how many of its validation samples each candidate predicts correctly. All clients
then fine-tune with the candidate that has the most correct predictions over all clients.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method


def fedavg_ft(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "fedavg-ft", {"personalise": "fine-tune"})
