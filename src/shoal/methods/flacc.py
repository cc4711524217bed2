"""FLACC: while one model is learned, clients whose updates point alike are merged into groups, which then part.

Mehta, Shao, A greedy agglomerative framework for clustered federated learning, IEEE Transactions on Industrial
Informatics 19(12), 2023, a baseline of paper 000.

| paper | here |
|---|---|
| clients or groups of clients are agglomerated greedily, by their gradient updates | `clusterers.GreedyClusters` |
| while the global model is learned, with a fraction of the clients in each round | `stages.agglomerative.Agglomerate` |
| no number of clusters | `cluster.threshold`: groups are merged whose updates have cosines above it |
| once it is complete, each cluster is a federation of its own | after `cluster.patience` rounds without a change |

Deviation: the paper's text could not be had. The table is its abstract; complete linkage, the threshold 0 and quiet
rounds as the end are from MetaClusterFL (github.com/ICT-CUbiCS/MetaClusterFL), which compares with it. What differs
from that code was decided by measurement on digits. For merging see `clusterers.agglomerative`. There a pair's last
cosine counts for 10 rounds and merges are final; here it is the mean over all rounds, and all is merged anew in every
round (`cluster.revise=false`: merges are final), because a client that is merged wrongly when little is known never
comes free. There groups part after 11 quiet rounds; 5 found the same groups earlier, and a round is quiet here only if
two or more clients trained in it. Groups start from the global model, not from means of what their members last sent.

Deviation: that code averages without weights; here clients weigh by their rows, as everywhere (`train.weighting`).

Deviation: nothing is said of clients that were merged with nobody (`cluster.smallest`) or come later: here they are
sent the models of groups, and join that whose loss is least. Groups that still have the same model are not offered,
and nobody is asked while fewer than two are left. Who has no rows joins none, and is served the largest group's model.
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
