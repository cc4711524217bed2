"""FedGroup: clients are clustered once by the directions of their first updates, and each cluster trains its own model.

Duan, Liu, Ji, Liu, Liang, Chen, Tan, FedGroup: efficient federated learning via decomposed similarity-based clustering,
ISPA 2021 (arXiv:2010.06870), a baseline of FedEPC (Tang et al. 2025). Details are from its authors'
code (github.com/morningD/FlexCFL).

| paper | here |
|---|---|
| group cold start: α·m clients train once | `stages.coldstart`: `cluster.alpha`, `represent.epochs` |
| m groups by EDC and k-means++ | `cluster.num_clusters`: `clusterers.DecomposedClusters` |
| a group's first model: the mean of its members' models | the same, including buffers, all members weighted equally |
| a group's optimisation direction | the mean of their updates, which the server keeps |
| client cold start: one epoch from the first model, then least (1 - cosine)/2 | `stages.coldstart.JoinByFirstUpdate` |
| FedAvg within each cluster (FedGrouProx: with μ) | `stages.train.TrainAndAggregate` (`train.mu`) |
| inter-group aggregation, η_G | `cluster.eta`, 0 by default: `stages.coldstart.ExchangeBetweenClusters` |

Deviations from the paper
-------------------------
- Client cold start: the paper assigns a client when it is first selected. Here all unassigned clients are assigned as
  soon as there are clusters, so that no client is evaluated with the model of another cluster.
- Unassigned clients: a client that did not respond, or has no samples, is served the model of the largest cluster and
  trains none.
- Directions: the update of a late-joining client is compared with the directions of the cold start, however late it
  joins. The authors' code uses the latest update of each cluster. The client and the cold start both begin at the first
  model, so these updates can be compared. A later update begins elsewhere and is small if the cluster has converged.
- η_G: the models are divided by the sum of the weights, so that they do not grow, as in the authors' code. That code
  exchanges only between clusters that trained in the round. Here all clusters exchange.
- Auxiliary global model: it is the mean of the cluster models and is left out, because no client trains it or is served
  it.
"""

from __future__ import annotations

from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_init, received_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.coldstart import ExchangeBetweenClusters, FormColdStartClusters, JoinByFirstUpdate
from shoal.stages.experts import expert_for
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method


def fedgroup(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    trial = setting.make_training("represent", LocalTraining, epochs=1, name="represent")
    cold_start = setting.make("cluster", FormColdStartClusters, program=trial, trainable=setting.model.trainable)
    return Method(
        name="fedgroup",
        init=one_model_init(setting.model),
        stages=(
            cold_start,
            JoinByFirstUpdate(trial, setting.model.trainable),
            *select_at_random(setting),
            setting.make("train", TrainAndAggregate, program=program, models_for=expert_for, rate=rate),
            setting.make("cluster", ExchangeBetweenClusters, trainable=setting.model.trainable),
        ),
        models_for=expert_for,
        predict=received_model_predict(setting.model),
        num_classes=setting.model.num_classes,
        cluster_assigner=cold_start,
    )
