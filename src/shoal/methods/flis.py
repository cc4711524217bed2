"""FLIS: clients whose models predict alike on samples at the server are clustered, and every cohort has some of each.

Morafah, Vahidian, Wang, Lin, FLIS: clustered federated learning via inference similarity for non-IID data distribution,
2022; a baseline of Pereira et al. 2025.

| paper | here |
|---|---|
| data at the server | `share.num_samples` samples, which every client sends once |
| similarity of predictions | `clusterers.prediction_similarity` |
| hierarchical clustering with a threshold | `cluster.threshold` or `cluster.num_clusters` |

Deviations from the paper
-------------------------
- One model: FLIS trains a model for each cluster. Paper 002 compares it as a way to select clients for one model, so
  here clusters are used for selection only, as in SimClust.
- First models: all clients train one epoch at the start, charged as preparation, so that there are predictions to
  compare.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.client.probe import SendSamples
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.selectors.clusters import one_of_each
from shoal.stages.cluster import FormClusters
from shoal.stages.prediction_similarity import SHARE_STAGE, PredictionAgreement, QueryPredictions
from shoal.stages.query import QueryClients
from shoal.stages.select import SelectFromClusters
from shoal.types import Method


def flis(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    training = setting.make_training("train", LocalTraining)
    share_samples = setting.make(SHARE_STAGE, SendSamples, input_shape=setting.model.input_shape, split=training.split)
    share = QueryClients(share_samples, includes_late_clients=False, name=SHARE_STAGE)
    trial = setting.make_training(
        "represent", LocalTraining, epochs=1, name="represent", sensitivity=training.sensitivity
    )
    query_predictions = QueryPredictions(trial, one_model_for, setting.model)
    form_clusters = FormClusters(setting.make("cluster", PredictionAgreement), column="predicted", runs_once=False)
    method = one_model_method(
        setting, "flis", share, query_predictions, form_clusters, SelectFromClusters(one_of_each), remember="model"
    )
    return replace(
        method,
        notes=(
            f"{share_samples.num_samples} samples of every client go to the server, which compares predictions on them",
        ),
    )
