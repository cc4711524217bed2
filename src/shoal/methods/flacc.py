"""FLACC: clients with similar updates are merged into clusters while they train one model, which then separate.

Mehta, Shao, A greedy agglomerative framework for clustered federated learning, IEEE Transactions on Industrial
Informatics 19(12), 2023, a baseline of FedEPC (Tang et al. 2025).

| paper | here |
|---|---|
| clients or clusters of clients are agglomerated greedily, by their gradient updates | `clusterers.GreedyClusters` |
| while the global model is learned, with a fraction of the clients in each round | `stages.agglomerative` |
| no number of clusters | `cluster.threshold`: two clusters are merged if the cosines of their updates are above it |
| once it is complete, each cluster is a federation of its own | after `cluster.patience` rounds without a change |

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The table follows its abstract. Complete linkage, the threshold 0 and
  the end after rounds without a change are from MetaClusterFL (github.com/ICT-CUbiCS/MetaClusterFL), which compares
  with this method. For the order of merges see `clusterers.agglomerative`.
- Cosines: MetaClusterFL uses the last cosine of a pair for 10 rounds. Here it is the mean over all rounds.
- Merges: in MetaClusterFL they are final. Here all clusters are formed again in every round, because a client that is
  merged wrongly in an early round would never leave its cluster (`cluster.remerge=false` makes merges final).
- End of clustering: MetaClusterFL separates the clusters after 11 rounds without a change. Here it is 5 rounds, and a
  round counts only if at least two clients trained in it.
- First cluster models: they are the global model, not the means of the members' last updates.
- Weights: MetaClusterFL averages without weights. Here clients are weighted by their number of samples, as in all
  methods (`train.weighting`).
- Clients that were not merged (`cluster.min_size`) and late-joining clients: the paper does not mention them. Here they
  are sent the cluster models and join the cluster whose model has the lowest loss. Clusters that still have the same
  model are not offered, and no client is queried while fewer than two models remain.
- Clients without samples: they join no cluster and are served the model of the largest one.
"""

from __future__ import annotations

from shoal.client.model_choice import ChooseModel
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_init, received_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.agglomerative import FormAgglomerativeClusters, JoinBestCluster
from shoal.stages.experts import expert_for
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method


def flacc(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    stage_fields = {"remember": "update", "trainable": setting.model.trainable}
    return Method(
        name="flacc",
        init=one_model_init(setting.model),
        stages=(
            JoinBestCluster(ChooseModel(setting.model, name="join")),
            *select_at_random(setting),
            setting.make("train", TrainAndAggregate, program=program, models_for=expert_for, rate=rate, **stage_fields),
            setting.make("cluster", FormAgglomerativeClusters),
        ),
        models_for=expert_for,
        predict=received_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
