"""FedGroup: clients are grouped once by the directions of their first updates; each group trains a model of its own.

Duan, Liu, Ji, Liu, Liang, Chen, Tan, FedGroup: efficient federated learning via decomposed similarity-based clustering,
ISPA 2021 (arXiv:2010.06870), a baseline of paper 000; details from its authors' code (github.com/morningD/FlexCFL).

| paper | here |
|---|---|
| group cold start: α·m clients train once | `stages.coldstart.GroupColdStart`: `cluster.alpha`, `represent.epochs` |
| m groups by EDC and k-means++ | `cluster.groups`: `clusterers.DecomposedClusters` |
| a group's first model: the mean of its members' models | the same, buffers with it, every member alike |
| a group's optimisation direction | the mean of their updates, kept |
| client cold start: one epoch from the first model, then least (1 - cosine)/2 | `stages.coldstart.ClientColdStart` |
| FedAvg within each group (FedGrouProx: with μ) | `stages.train.Federate` (`train.mu`) |
| inter-group aggregation, η_G | `cluster.eta`, 0 by default: `stages.coldstart.InterGroup` |

Deviation: the paper starts a newcomer when it is first chosen; here everybody who is in no group is started as soon as
there are groups, so that nobody is measured with another group's model. A client that did not answer, or has no rows,
is served the largest group's model, and trains none.

Deviation: a newcomer's update is compared with the groups' directions of the cold start, however late it comes; the
authors' code takes each group's latest update. Both the newcomer and the cold start set out from the first model, so
these can be compared, while a later update starts elsewhere and is small where a group has learned what it can.

Deviation: with η_G the authors' code divides by the sum of the weights, so that models do not grow; so does this one.
There only those groups exchange that trained in the round; here all do, so a group that rested is moved too.

Deviation: the auxiliary global model, the mean of the groups' models, is left out: no client is served or trains it.
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
    program = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    trial = setting.make_training("represent", LocalTraining, epochs=1, group="represent")
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
