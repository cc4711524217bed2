"""FedPer: all layers but the last are trained together, the last one is each client's own.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization layers, arXiv:1912.00818, 2019.

| paper | here |
|---|---|
| base layers W_B, personalization layers W_P | `Model.parts`: the head is the last layer; buffers are the base's |
| W_P of a client, at first by chance | kept by it; the first follows from a seed, equal for all |
| SGD on (W_B, W_P) jointly: e epochs, η, b | `train.*`: `client.personal_models.KeepHead` |
| W_B ← Σ n_j/N W_B,j | `stages.train.FederatePart` |

Only bases travel, down and up. A client is served the newest base with its own head, which may have been trained on an
older one. A client that never trained, and one without data, get the first head, which nobody has trained: heads never
leave their clients. At first that is chance; later it is what bases trained under other heads happen to do with it,
better than chance only because all heads started from it.

Deviation: the paper also tries more than one personal layer, and all clients in every round; here it is one, and
`--cohort` says who takes part. Its text was not at hand: the table is from what is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal import tree
from shoal.client.personal_models import KeepHead
from shoal.client.train import LocalTraining
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.train import AggregateBase, LearningRate
from shoal.types import ClientId, Method, Params, Predict, ServerState, Tree


def fedper(setting: Setting) -> Method:
    return personal_heads_method(setting, "fedper", KeepHead(setting.make_training("train", LocalTraining)))


def personal_heads_method(setting: Setting, name: str, program: KeepHead) -> Method:
    """One base for all, trained by clients who keep their heads."""
    rate = setting.make("train", LearningRate, lr=program.training.lr, rounds=setting.rounds)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        base, head = setting.model.split_base_and_head(setting.model.init(first))
        return ServerState(0, {"base": base}, memory={"train": {"first": torch.tensor(first), "head": head}})

    return Method(
        name=name,
        init=init,
        stages=(
            *select_at_random(setting),
            setting.make("train", AggregateBase, program=program, models_for=base_for, rate=rate),
        ),
        models_for=base_and_first_head_for,
        predict=personal_head_predict(setting.model),
        num_classes=setting.model.num_classes,
    )


def base_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    return {"base": state.models["base"]}


def base_and_first_head_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    base, head = state.models["base"], state.memory["train"]["head"]
    return {
        "base": base,
        "head": tree.to_device(head, next(iter(base.values())).device),
    }  # a resumed run has it on the CPU


def personal_head_predict(model: Model) -> Predict:
    """The base with the client's own head where it has one, else with the first."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(models["base"] | private.get("head", models["head"]), x)

    return predict
