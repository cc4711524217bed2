"""CLSM-FL: models are clustered by their accuracy for each class on samples at the server, and clusters overlap.

Lee, Seo, CLSM-FL: clustering-based semantic federated learning in non-IID IoT environment, IEEE Internet of Things
Journal 11(18), 2024; a baseline of FedEPC (Tang et al. 2025).

| paper | here |
|---|---|
| auxiliary data set at the server | `share.num_samples` labelled samples, which every client sends once |
| capability of a local model | `stages.capability_clusters.capability`, for every received model in every round |
| soft clustering into semantic clusters | `FuzzyRule`: `cluster.num_clusters`, `cluster.fuzziness` |
| aggregation by memberships | `stages.capability_clusters.FormCapabilityClusters`, `stages.train.TrainAndAggregate` |
| interpretable clusters | a cluster's centre shows which classes its models know: `centres` in the stage's memory |

A model is described by its accuracies for each class, relative to each other. Clusters come from fuzzy c-means (m = 2)
and keep their numbers from round to round. A client trains, and is served, the mean of the cluster models weighted by
its memberships, so that one model travels. An unseen client is served the mean weighted by the memberships of all
clients. In every round all clients that have ever trained are clustered, each by its last report, however old. A
cluster model moves towards the mean of the received models, in proportion to how much the cohort belongs to the
cluster. It moves all the way if the cohort belongs to the cluster at least as much as all clients do on average:
memberships are never 0, and a cohort of clients that hardly belong to a cluster would otherwise replace its model.

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The method follows its abstract and the description by
  Tang et al. 2025 (Sec. 2): soft clusters of local models by their inherent properties, clusters with a meaning, and
  evaluation on auxiliary data with clustering in every round. Everything else is our reading of these two texts.
"""

from __future__ import annotations

from shoal.client.probe import SendSamples
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import received_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.rng import derive_seed
from shoal.stages.capability_clusters import FormCapabilityClusters, FuzzyRule, blended_model
from shoal.stages.prediction_similarity import SHARE_STAGE
from shoal.stages.query import QueryClients
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method, ServerState


def clsm_fl(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", LocalTraining)
    share_samples = setting.make(
        SHARE_STAGE, SendSamples, input_shape=setting.model.input_shape, sends_labels=True, split=program.split
    )
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    rule = setting.make("cluster", FuzzyRule)
    clusters = FormCapabilityClusters(rule, setting.model)
    train = setting.make(
        "train", TrainAndAggregate, program=program, models_for=blended_model, rate=rate, server_updates=(clusters,)
    )

    def init(seed: int) -> ServerState:
        first_model = setting.model.init(derive_seed(seed, "init"))
        return ServerState(0, {f"cluster-{k:03d}": first_model for k in range(rule.num_clusters)})

    return Method(
        name="clsm-fl",
        init=init,
        stages=(
            QueryClients(share_samples, includes_late_clients=False, name=SHARE_STAGE),
            *select_at_random(setting),
            train,
        ),
        models_for=blended_model,
        predict=received_model_predict(setting.model),
        num_classes=setting.model.num_classes,
        cluster_assigner=clusters,
        notes=(
            f"{share_samples.num_samples} labelled samples of every client go to the server, "
            "which evaluates models on them",
        ),
    )
