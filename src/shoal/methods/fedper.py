"""FedPer: all clients train the layers below the last together, and each client has its own last layer.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization layers, arXiv:1912.00818, 2019.

| paper | here |
|---|---|
| base layers W_B, personalization layers W_P | the head is the last layer, buffers belong to the base |
| W_P of a client, random at first | private state; the first head follows from a seed and is equal for all |
| SGD on (W_B, W_P) jointly: e epochs, η, b | `train.*`: `client.personal_models.KeepHead` |
| W_B ← Σ n_j/N W_B,j | `stages.train.AggregateBaseLayers` |

Only bases are sent and received. A client is served the newest base with its own head, which may have been trained with
an older base. A client that has never trained, or has no samples, uses the first head. No client trained that head,
since heads never leave their clients. Its predictions are random at first. Later they are better than random only
because all heads started from it.

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The table follows what is generally known of it.
- Personal layers: the paper also tries more than one. Here the last layer is personal.
- Cohort: the paper also trains all clients in every round. Here `--cohort` sets how many train.
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
from shoal.stages.train import AggregateBaseLayers, LearningRate
from shoal.types import ClientId, Method, Params, Predict, ServerState, Tree


def fedper(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return personal_heads_method(setting, "fedper", KeepHead(setting.make_training("train", LocalTraining)))


def personal_heads_method(setting: Setting, name: str, program: KeepHead) -> Method:
    """Builds a method in which clients train a common base and keep their heads."""
    rate = setting.make("train", LearningRate, lr=program.training.lr, rounds=setting.rounds)

    def init(seed: int) -> ServerState:
        first_seed = derive_seed(seed, "init")
        base, head = setting.model.split_base_and_head(setting.model.init(first_seed))
        return ServerState(0, {"base": base}, memory={"train": {"first": torch.tensor(first_seed), "head": head}})

    return Method(
        name=name,
        init=init,
        stages=(
            *select_at_random(setting),
            setting.make("train", AggregateBaseLayers, program=program, models_for=base_for, rate=rate),
        ),
        models_for=base_and_first_head_for,
        predict=personal_head_predict(setting.model),
        num_classes=setting.model.num_classes,
    )


def base_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the base, for every client."""
    return {"base": state.models["base"]}


def base_and_first_head_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the base and the first head, which a client without a head of its own uses."""
    base, head = state.models["base"], state.memory["train"]["head"]
    # After a resume the head is on the CPU.
    return {"base": base, "head": tree.to_device(head, next(iter(base.values())).device)}


def personal_head_predict(model: Model) -> Predict:
    """Returns a function that predicts with the base and the client's head, or the first head if it has none."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(models["base"] | private.get("head", models["head"]), x)

    return predict
