"""FedCos: FedAvg whose clients are asked to go the way that the global model went in the round before.

Zhang, Wu, Cheng, Liu, FedCos: a scene-adaptive enhancement for federated learning, IEEE Internet of Things Journal,
2022; arXiv:2204.03174.

| paper | here |
|---|---|
| d = w^t - w^{t-1}, of all trained parameters | kept by `stages.train.FederateDirected`, sent beside the model |
| L(w) + μ (1 - cos(w - w^t, d)) | μ is `train.cosine`: `client.align.AlignedTraining` |
| cos = <w - w^t, d> / √(|w - w^t|² |d|² + 10⁻⁴) | `client.align.cosine` |
| w ← mean of w_k | averaged by rows |

In the first round there is no direction yet: it is FedAvg's. From then on clients are sent two models' worth of
numbers: who took part before has an older model only.

Deviation: the paper's text was not at hand, so there are no numbers of equations, and what it says of choosing μ is not
known; all of the above is what the authors' program does. There the cosine is written by the three sides of a triangle,
which is the same number. It averages all clients alike (`train.weighting=uniform`). μ is 0.02 as its default is; the
authors' example for 100 clients has 0.01. Their combinations with a step length or momentum on the server are left out.
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
    model = state.models["global"]
    if "train" not in state.memory:
        return {"global": model}
    direction = tree.to_device(
        state.memory["train"]["direction"], next(iter(model.values())).device
    )  # resumed: on the CPU
    return {"global": model, "direction": direction}
