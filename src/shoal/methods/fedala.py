"""FedALA: before it trains, each client learns how much of the global model to let into its own, number by number.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedALA: adaptive local aggregation for personalized federated learning, AAAI
2023.

| paper | here |
|---|---|
| Θ̂_i ← Θ_i + (Θ - Θ_i) ⊙ [1; W_i] | `client.local_aggregation.LocalAggregation`; Θ_i is the client's own model |
| p higher layers have weights W_i, lower ones are Θ's | `ala.layers`, counted from the last |
| s %, a random share of the client's rows | `ala.share`, drawn anew for each task |
| W_i ← clip(W_i - η ∇_W L(Θ̂_i), 0, 1) | `ala.lr`, `ala.batch_size` |
| W_i at first until it converges, later one pass | `ala.first_epochs` when a client is first back, `ala.epochs` |
| Θ_i ← SGD from Θ̂_i | `train.*`: `client.local_aggregation.AggregateAndTrain` |
| Θ ← Σ n_i/n Θ_i | `stages.train.Federate` |

A client keeps its trained model and its weights, which start at 1 (all of the global model). Who takes part for the
first time has no model of its own, and starts from the global one. When it is next drawn, it learns its weights in
`ala.first_epochs` passes of a stage before training, for which it is sent the global model, once more than in the
paper; the pass of `ala.epochs` follows, as it does every time after.

What is served is the newest global model let into the client's own by its last weights, which costs no training: the
authors too evaluate after aggregation and before training. `serve.model=trained` serves the model as the client last
trained it. Who never took part is served the global model.

Deviation: the authors repeat passes until the last ten losses hardly differ, which needs eleven at least; fleets that
run many clients at once make a fixed number, 10 and the usual 1. There every client aggregates in every round, drawn or
not, and before evaluation with weights learned for the newest model; here only who takes part does. They take rows that
lie together and leave out an incomplete batch; here the share is any rows, all of them. In a client's first round the
pass is made, and charged, but changes nothing. Buffers (batch norm's statistics) are the global model's. Values of
η, s and p are the defaults of their program, which counts tensors, two to a layer; equations are as there, the paper's
text was not at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.client.local_aggregation import (
    AggregateAndTrain,
    LearnAggregationWeights,
    LocalAggregation,
    aggregated_predict,
)
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, personal_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.second_participation import RunOnSecondParticipation
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method, Stage, option


@dataclass(frozen=True)
class Serving:
    model: Literal["aggregated", "trained"] = option(
        "aggregated",
        "Predict with the newest global model aggregated into the local one (aggregated) or with the model that the "
        "client trained last (trained).",
    )


def fedala(setting: Setting) -> Method:
    training = setting.make_training("train", LocalTraining)
    local_aggregation = setting.make(
        "ala", LocalAggregation, model=setting.model, batch_size=training.batch_size, split=training.split
    )
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    first = LearnAggregationWeights(replace(local_aggregation, epochs=local_aggregation.first_epochs))
    weight_stages: tuple[Stage, ...] = (
        (RunOnSecondParticipation(first, one_model_for, name="ala"),) if local_aggregation.first_epochs else ()
    )
    program = AggregateAndTrain(local_aggregation, training)
    train = setting.make("train", TrainAndAggregate, program=program, models_for=one_model_for, rate=rate)
    uses_aggregated = setting.make("serve", Serving).model == "aggregated"
    return Method(
        name="fedala",
        init=one_model_init(setting.model),
        stages=(*select_at_random(setting), *weight_stages, train),
        models_for=one_model_for,
        predict=aggregated_predict(local_aggregation) if uses_aggregated else personal_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
