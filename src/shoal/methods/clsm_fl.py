"""CLSM-FL: models received are tried class by class on the server's rows; those of like ability share soft clusters.

Lee, Seo, CLSM-FL: clustering-based semantic federated learning in non-IID IoT environment, IEEE Internet of Things
Journal 11(18), 2024; a baseline of paper 000.

| original | here |
|---|---|
| auxiliary data set at the server | `share.rows` labelled rows of every client, sent once: the rows themselves leave |
| what a local model is capable of | `stages.capability_clusters.capability`, in every round of every model received |
| soft clustering into semantic clusters | `cluster.groups`, `cluster.fuzziness`: `stages.capability_clusters.Soft` |
| aggregation by memberships | `stages.capability_clusters.Semantic`, `stages.train.Federate` |
| interpretable clusters | a cluster's centre says which classes its models know: `centres` in the stage's memory |

Deviation: the original's text was not at hand, only its abstract and what paper 000 says of it (Sec. 2). These give:
soft clusters of local models by their inherent properties, clusters whose meaning says what the models can do,
evaluation on auxiliary data and clustering in every round. All else is a reading of that.

Decided here: a model's properties are its per-class abilities, in relation to each other. Clusters come from fuzzy
c-means (m = 2) and keep their numbers from round to round. A client is served, and trains, the mean of the clusters'
models by its memberships: one model travels, and on digits it was a little better than the nearest cluster's alone.
A client that never trained is served the mean by everybody's memberships. In every round all clients that ever trained
are clustered, each by the last model that it sent, however old. A cluster's model goes towards the mean of what was
received in proportion to how much the round's clients belong to it, and all the way where that is no less than all
clients do on average: memberships are never 0, and a round of outsiders would else replace it.
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
    program = setting.make_training("train", LocalTraining)
    share_samples = setting.make(
        SHARE_STAGE, SendSamples, shape=setting.model.input_shape, labelled=True, split=program.split
    )
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    rule = setting.make("cluster", FuzzyRule)
    clusters = FormCapabilityClusters(rule, setting.model)
    train = setting.make(
        "train", TrainAndAggregate, program=program, models_for=blended_model, rate=rate, updates=(clusters,)
    )

    def init(seed: int) -> ServerState:
        first = setting.model.init(derive_seed(seed, "init"))
        return ServerState(0, {f"cluster-{k:03d}": first for k in range(rule.num_clusters)})

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
        notes=(f"{share_samples.num_samples} labelled rows of every client leave it, for the server to try models on",),
    )
