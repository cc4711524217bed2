"""FedEPC: clients whose activations are alike share a model; in each group a bandit chooses who trains in time.

Tang et al., FedEPC: An efficient and privacy-enhancing clustering federated learning method for sensing-computing
fusion scenarios, Computers, Materials & Continua, 2025 (doi:10.32604/cmc.2025.066241; paper 000).

| paper | here |
|---|---|
| SPRE, Eq. 1-2, Alg. 1 | `represent`: `client.sparsity.Sparsity` |
| AIDC, Eq. 3-8, Alg. 2 | `cluster`: `clusterers.AdaptiveDensityClusters`, `stages.experts.Experts` |
| CICS, Eq. 9-12, Alg. 3 | `select`: `stages.bandit.Budgeted`, `selectors.bandit.SetBandit` |
| Eq. 13-14, proximal local loss, μ | `train.mu` of `client.train.LocalTraining` |
| Eq. 15, plain mean in a cluster | `stages.train.Federate` with `train.weighting=uniform` |
| Alg. 4, the trained model to all members | `stages.experts.expert_for` |

Deviation (SPRE): sparsity is counted for each row and averaged, after one local epoch from an extraction model that
stays the same for all time, so that answers can be compared. Besides the vector of the paper three more leave a client,
of the model as received: over all rows and over either half. They tell difference from chance, and more about labels
than the adapted one does (docs/privacy.md).

Deviation (AIDC): distances are in units of their mean (`cluster.scale`; in units of the median two unequal groups are
lost), and whether clients differ at all is tested first, mean distance against that of halves: without that test a
nearly IID fleet is cut into pieces. Groups are formed anew when the clients known have doubled; who drifts is moved.

Deviation (CICS): the budget of a group is 16 % of its total time but lets in its slowest client (`select.quantile`):
the median shuts a third of the clients out for ever and costs more than any choice gains. The bandit's process is
exact, its kernel that of the energy distance (`select.literal` is the printed one). A reward is the share of the loss
of the whole group that a set took away, by the time of its slowest client; all members are sent their group's model and
tell their loss in every round for it. Of Eq. (9), the norm is that of a client's whole update in its last rounds, since
gradients are not sent. Eq. (12) is a model that nothing observable follows from, and is left out.

Deviation (Alg. 4): not the run but a group stops, when its loss changes by less than `select.tolerance` of itself in
`select.history` rounds in a row; by default none does. A client that is in no group is served the largest group's
model; an unseen one too, or that of the group whose members' received models are as sparse on their rows (`shoal
evaluate --assign`).

Deviation: the paper takes sparsity vectors for private. A server can read label distributions from them, so noise can
be added and its (ε, δ) is stated.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "sparsity", "cluster": "aidc", "select": "bandit", "train": "proximal"}
DEFAULTS = {"train": {"mu": 0.01, "weighting": "uniform"}}


def fedepc(setting: Setting) -> Method:
    return compose(setting, "fedepc", PIECES, DEFAULTS)
