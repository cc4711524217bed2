"""FedCos: FedAvg whose clients train in the direction in which the global model moved in the round before.

Zhang, Wu, Cheng, Liu, FedCos: a scene-adaptive enhancement for federated learning, IEEE Internet of Things Journal,
2022; arXiv:2204.03174.

| paper | here |
|---|---|
| d = w^t - w^{t-1}, of all trained parameters | `stages.train.AggregateWithDirection`, sent beside the model |
| L(w) + μ (1 - cos(w - w^t, d)) | μ is `train.cosine`: `client.align.AlignedTraining` |
| cos = <w - w^t, d> / √(|w - w^t|² |d|² + 10⁻⁴) | `client.align.cosine` |
| w ← mean of w_k | weighted by samples |

The first round has no direction yet and is a round of FedAvg. From the second round on a client is sent twice as many
numbers, the model and the direction: a client that trained before has only an older model.

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The table therefore gives no numbers of equations, and we do not know
  what the paper says about the choice of μ. All of the table is what the authors' program does.
- Cosine: the authors' program computes it from the three sides of a triangle, which gives the same number.
- Weights: the authors' program weights all clients equally (`train.weighting=uniform`).
- μ: it is 0.02, as in the defaults of the authors' program. Their example for 100 clients has 0.01.
- Combinations: the authors' variants with a server learning rate or server momentum are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal import tree
from shoal.client.align import AlignedTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, one_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.train import AggregateWithDirection, LearningRate
from shoal.types import ClientId, Method, Params, ServerState


def fedcos(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", AlignedTraining)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    stage_fields = {
        "program": program,
        "models_for": model_and_direction_for,
        "rate": rate,
        "trainable": setting.model.trainable,
    }
    return Method(
        name="fedcos",
        init=one_model_init(setting.model),
        stages=(*select_at_random(setting), setting.make("train", AggregateWithDirection, **stage_fields)),
        models_for=one_model_for,
        predict=one_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )


def model_and_direction_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the global model and, from the second round on, the direction in which it moved last."""
    model = state.models["global"]
    if "train" not in state.memory:
        return {"global": model}
    # After a resume the direction is on the CPU.
    direction = tree.to_device(state.memory["train"]["direction"], next(iter(model.values())).device)
    return {"global": model, "direction": direction}
