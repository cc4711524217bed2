"""FedEPC: clients with similar activations share a model, and a bandit selects clients within a time budget.

Tang et al., FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
fusion scenarios, Computers, Materials & Continua, 2025 (doi:10.32604/cmc.2025.066241).

| paper | here |
|---|---|
| SPRE, Eq. 1-2, Alg. 1 | `represent`: `client.sparsity.MeasureSparsity` |
| AIDC, Eq. 3-8, Alg. 2 | `cluster`: `clusterers.AdaptiveDensityClusters`, `stages.experts.ClusterModels` |
| CICS, Eq. 9-12, Alg. 3 | `select`: `stages.bandit.SelectByBandit`, `selectors.bandit.SetBandit` |
| Eq. 13-14, proximal local loss, μ | `train.mu` of `client.train.LocalTraining` |
| Eq. 15, plain mean in a cluster | `stages.train.TrainAndAggregate` with `train.weighting=uniform` |
| Alg. 4, the trained model to all members | `stages.experts.expert_for` |

Deviations from the paper
-------------------------
- SPRE, sparsity: it is counted for each sample and averaged, after one local epoch from an extraction model that never
  changes, so that the vectors of clients can be compared.
- SPRE, messages: a client sends three vectors more than in the paper. They describe the received model on all samples
  and on either half of them. They separate a difference between clients from a random one, and they reveal more about
  labels than the adapted vector does (docs/privacy.md).
- SPRE, privacy: the paper treats sparsity vectors as private. A server can infer label distributions from them, so
  noise can be added, and its (ε, δ) is stated in the result.
- AIDC, distances: they are divided by their mean (`cluster.scale`). With the median, two clusters of unequal size are
  not found.
- AIDC, test for clusters: the mean distance between clients is first compared with the mean distance between the halves
  of a client. Without this test a nearly IID fleet is split.
- AIDC, time: clusters are formed again when the number of clients with a vector has doubled. A client whose data drift
  is reassigned.
- CICS, budget: it is 16 % of the total time of a cluster, but at least the time of its slowest client
  (`select.quantile`). The median of the paper excludes a third of the clients for ever.
- CICS, bandit: its Gaussian process is exact, and its kernel is that of the energy distance (`select.as_published=true`
  uses the printed kernel).
- CICS, reward: it is the fraction of the loss of the whole cluster that a set removed, divided by the time of its
  slowest client. For it all members are sent the model of their cluster and report their loss in every round.
- CICS, Eq. 9: the norm is that of the client's whole update in its last rounds, because gradients are not sent.
- CICS, Eq. 12: it is left out, because no observable quantity follows from it.
- Alg. 4, stopping: a cluster stops, not the run, when its loss changes by less than the fraction `select.tolerance` in
  `select.history` rounds in a row. By default no cluster stops.
- Clients without a cluster: they are served the model of the largest cluster. So is an unseen client, unless `shoal
  evaluate --infer-from-inputs` is given. Then it is served the model of the cluster whose members have the most similar
  sparsity of the received model.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "sparsity", "cluster": "aidc", "select": "bandit", "train": "proximal"}
DEFAULTS = {"train": {"mu": 0.01, "weighting": "uniform"}}


def fedepc(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "fedepc", PIECES, DEFAULTS)
