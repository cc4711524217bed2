"""FLIS: clients whose models predict alike on rows that the server holds are grouped; every round takes some of each.

Morafah, Vahidian, Wang, Lin, FLIS: clustered federated learning via inference similarity for non-IID data
distribution, 2022; a baseline of paper 002.

| paper | here |
|---|---|
| data at the server | `share.rows` of every client, sent once: the rows themselves leave the clients |
| similarity of predictions | `clusterers.prediction_similarity` |
| hierarchical clustering with a threshold | `cluster.threshold` or `cluster.groups`: `stages.prediction_similarity` |

Deviation: FLIS trains a model for each cluster; paper 002 compares it as a way to choose clients for one model, so
here groups only choose, as SimClust's do. Everybody trains one epoch at the start, charged as preparation, so that
there are predictions to compare.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.client.probe import SendSamples
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.selectors.groups import one_of_each
from shoal.stages.cluster import FormClusters
from shoal.stages.prediction_similarity import SHARE_STAGE, PredictionAgreement, QueryPredictions
from shoal.stages.query import QueryClients
from shoal.stages.select import SelectFromClusters
from shoal.types import Method


def flis(setting: Setting) -> Method:
    trained = setting.make_training("train", LocalTraining)
    share_samples = setting.make(SHARE_STAGE, SendSamples, shape=setting.model.input_shape, split=trained.split)
    share = QueryClients(share_samples, includes_late_clients=False, name=SHARE_STAGE)
    trial = setting.make_training("represent", LocalTraining, epochs=1, group="represent", rows=trained.sensitivity)
    infer = QueryPredictions(trial, one_model_for, setting.model)
    form_clusters = FormClusters(setting.make("cluster", PredictionAgreement), column="predicted", runs_once=False)
    method = one_model_method(
        setting, "flis", share, infer, form_clusters, SelectFromClusters(one_of_each), remember="model"
    )
    return replace(
        method, notes=(f"{share_samples.num_samples} rows of every client leave it, for the server to try models on",)
    )
