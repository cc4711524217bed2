"""FedALA: each client learns for every parameter how much of the global model to mix into its own.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, FedALA: adaptive local aggregation for personalized federated learning, AAAI
2023.

| paper | here |
|---|---|
| Θ̂_i ← Θ_i + (Θ - Θ_i) ⊙ [1; W_i] | `client.local_aggregation.LocalAggregation`; Θ_i is the client's personal model |
| p higher layers have weights W_i, lower ones are Θ's | `local_aggregation.layers`, counted from the last |
| s %, a random fraction of the client's samples | `local_aggregation.sample_fraction`, drawn again for each task |
| W_i ← clip(W_i - η ∇_W L(Θ̂_i), 0, 1) | `local_aggregation.lr`, `local_aggregation.batch_size` |
| W_i until it converges at first, later one epoch | `local_aggregation.first_epochs`, `local_aggregation.epochs` |
| Θ_i ← SGD from Θ̂_i | `train.*`: `client.local_aggregation.AggregateAndTrain` |
| Θ ← Σ n_i/n Θ_i | `stages.train.TrainAndAggregate` |

A client keeps its trained model and its aggregation weights, which start at 1 (the global model alone). A client that
trains for the first time has no personal model and starts from the global one. At its second participation it learns
its weights for `local_aggregation.first_epochs` epochs in a stage before training. For this stage it is sent the global
model, once more than in the paper. The `local_aggregation.epochs` epochs follow, as in every later participation.

A client is served the newest global model, mixed into its personal model by its last weights, which costs no training:
the authors, too, evaluate after aggregation and before training. With `serve.model=trained` it is served the model that
it trained last. A client that has never trained is served the global model.

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The equations and the values of η, s and p are those of the authors'
  program, which counts tensors, two to a layer.
- Convergence: the authors repeat epochs until the last ten losses hardly differ, which needs at least eleven. Fleets
  that train many clients at once need a fixed number, which is 10 at first and 1 later.
- Which clients aggregate: in the authors' program every client aggregates in every round, selected or not, and learns
  weights for the newest model before evaluation. Here only the cohort does.
- Samples: the authors take adjacent samples and leave out an incomplete batch. Here the fraction is random, and all its
  samples are used.
- First participation: the epoch is run and charged, but it changes nothing.
- Buffers: the statistics of batch norm are those of the global model.
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
    """Options for the model with which a client predicts."""

    model: Literal["aggregated", "trained"] = option(
        "aggregated",
        "Predict with the newest global model, mixed into the client's model (aggregated), or with the model that the "
        "client trained last (trained).",
    )


def fedala(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    training = setting.make_training("train", LocalTraining)
    local_aggregation = setting.make(
        "local_aggregation", LocalAggregation, model=setting.model, batch_size=training.batch_size, split=training.split
    )
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    learn_weights = LearnAggregationWeights(replace(local_aggregation, epochs=local_aggregation.first_epochs))
    weight_stages: tuple[Stage, ...] = (
        (RunOnSecondParticipation(learn_weights, one_model_for, name="ala"),) if local_aggregation.first_epochs else ()
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
