"""FedRep: each client fits a head of its own to the shared layers, then improves these for it; heads stay.

Collins, Hassani, Mokhtari, Shakkottai, Exploiting shared representations for personalized federated learning, ICML
2021, Algorithm 1.

| paper | here |
|---|---|
| representation φ, heads h_i | `Model.parts`: the head is the last layer; buffers are the representation's |
| τ_h updates of h_i with φ^t | `train.head_epochs`: `client.personal_models.HeadFirst` |
| updates of φ with the new h_i | `train.epochs` |
| α | `train.lr`, of both |
| φ^{t+1} ← mean of φ_i over the clients of the round | `stages.train.FederatePart` |

What travels and what is served, to clients that never trained too: as in `fedper`. A head that has not been trained for
long fits an older representation; the authors' program lets all clients train once more at the end, here they do not.

`train.head_epochs` is 10, as in the paper's experiments: it wants the head near its best for the representation at
hand before this is moved, and gives the representation 1 or 5 epochs.

Deviation: clients weigh by their rows, as in the authors' program; the paper's algorithm weighs all alike
(`train.weighting=uniform`). While heads are trained batch norm's statistics stay as received: they belong to what is
frozen.
"""

from __future__ import annotations

from shoal.client.personal_models import TrainHeadThenBase
from shoal.client.train import LocalTraining
from shoal.methods.composition.setting import Setting
from shoal.methods.fedper import personal_heads_method
from shoal.types import Method


def fedrep(setting: Setting) -> Method:
    training = setting.make_training("train", LocalTraining)
    return personal_heads_method(
        setting, "fedrep", setting.make("train", TrainHeadThenBase, training=training, head_epochs=10)
    )
