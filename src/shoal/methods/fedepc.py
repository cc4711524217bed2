"""FedEPC: clients whose activations are alike share a model; in each group a bandit chooses who trains in time.

Paper 000 (FedEPC: personalised federated learning for edge devices by clusters).

| paper | here |
|---|---|
| SPRE, Eq. 1-2, Alg. 1 | `represent`: `client.sparsity.Sparsity` |
| AIDC, Eq. 3-8, Alg. 2 | `cluster`: `clusterers.AdaptiveDensityClusters`, `stages.experts.Experts` |
| CICS, Eq. 9-12, Alg. 3 | `select`: `stages.budgeted.Budgeted`, `selectors.bandit.SetBandit` |
| Eq. 13-14, proximal local loss, μ | `train.mu` of `client.train.LocalTraining` |
| Eq. 15, plain mean in a cluster | `stages.train.Federate` with `train.weighting=uniform` |
| Alg. 4, the trained model to all members | `stages.experts.expert_for` |

Deviation: sparsity is counted for each row and averaged, after one local epoch from common first weights. Distances are
in units of their median, and split-half distances tell whether clients differ at all: without that test a nearly IID
fleet is cut into pieces. The bandit's process is exact, its kernel that of the energy distance; a reward is the share
of the loss that a set took away, by the time of its slowest client. Eq. (12) is a model that nothing observable follows
from, and is left out. A client that is in no group is served the largest group's model.

Deviation: the paper takes sparsity vectors for private. A server can read label distributions from them
(docs/privacy.md), so noise can be added and its (ε, δ) is stated.
"""

from __future__ import annotations

from shoal.client.sparsity import Sparsity
from shoal.client.train import LocalTraining
from shoal.methods.setting import Setting
from shoal.methods.single import one_model_init, received_model_predict
from shoal.stages.budgeted import Budgeted
from shoal.stages.cluster import Adaptive
from shoal.stages.experts import Experts, expert_for
from shoal.stages.represent import AskOnce
from shoal.stages.train import Federate, Rate
from shoal.types import Method


def fedepc(s: Setting) -> Method:
    program = s.training("train", LocalTraining, mu=0.01)
    rate = s.make("train", Rate, lr=program.lr, rounds=s.rounds)
    adaptation = s.training("represent", LocalTraining, epochs=1, name="represent")
    ask = AskOnce(s.make("represent", Sparsity, adaptation=adaptation), expert_for)
    experts = Experts(s.make("cluster", Adaptive), column="sparsity")
    choose = s.make("select", Budgeted)
    kept = {"remember": "summary", "trainable": s.model.trainable, "weighting": "uniform"}
    train = s.make("train", Federate, program=program, models_for=expert_for, rate=rate, **kept)
    return Method(
        name="fedepc",
        init=one_model_init(s.model),
        stages=(ask, experts, choose, train),
        models_for=expert_for,
        predict=received_model_predict(s.model),
        classes=s.model.classes,
    )
