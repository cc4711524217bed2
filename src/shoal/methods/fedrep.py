"""FedRep: each client first fits its own head to the shared layers, then trains these layers with that head.

Collins, Hassani, Mokhtari, Shakkottai, Exploiting shared representations for personalized federated learning, ICML
2021, Algorithm 1.

| paper | here |
|---|---|
| representation φ, heads h_i | the head is the last layer, buffers belong to the representation |
| τ_h updates of h_i with φ^t | `train.head_epochs`: `client.personal_models.TrainHeadThenBase` |
| updates of φ with the new h_i | `train.epochs` |
| α | `train.lr`, of both |
| φ^{t+1} ← mean of φ_i over the clients of the round | `stages.train.AggregateBaseLayers` |

Only bases are sent and received, and unseen clients are served as in `fedper`. `train.head_epochs` is 10, as in the
paper's experiments: the head should be near its optimum for the current representation before the representation
changes. The experiments train the representation for 1 or 5 epochs.

Deviations from the paper
-------------------------
- Old heads: a head that was trained many rounds ago fits an older representation. The authors' program lets all clients
  train once more at the end. Here they do not.
- Weights: clients are weighted by their number of samples, as in the authors' program. The paper's algorithm weights
  all clients equally (`train.weighting=uniform`).
- Batch norm: its statistics stay as received while the head trains, because they belong to the frozen layers.
"""

from __future__ import annotations

from shoal.client.personal_models import TrainHeadThenBase
from shoal.client.train import LocalTraining
from shoal.methods.composition.setting import Setting
from shoal.methods.fedper import personal_heads_method
from shoal.types import Method


def fedrep(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    training = setting.make_training("train", LocalTraining)
    return personal_heads_method(
        setting, "fedrep", setting.make("train", TrainHeadThenBase, training=training, head_epochs=10)
    )
