"""FedClusterEnsemble: clusters train apart, members in turn; whoever is in no cluster is answered by the surest model.

Freitas, Akabane, Estrella, FedClusterEnsemble: Enhancing clustered federated learning through confidence-based
ensembles and cyclic intra cluster client selection (paper 004).

| paper | here |
|---|---|
| round 1: all clients train w_0 (Alg. 2, 4-6) | `stages.select.InTurn`: everybody who is in no cluster |
| DBSCAN on last layers (9-10): ε, min_samples | `cluster.reach`, `cluster.smallest`: `clusterers.NeighbourClusters` |
| w_m, weighed by rows (13-14) | `stages.first_round_clusters.FormFirstRoundClusters`, `stages.train.Federate` |
| one client of each cluster in turn (18-21) | `select.take=one`: w_m is that client's model, bit for bit |
| 70 % of each cluster in turn (Sec. 4, item 4) | `select.take=share`, `select.share`: `selectors.round_robin` |
| confidence (Alg. 3) | `serve.rule=logit`: `client.confidence.Confidence` |
| client updates (Eq. 4) | `train.updates` of a round, `updates` of the result |

`--cohort` plays no part: `select` says how many take part.

Deviation: line 9 takes the last layer of the mean, of which there is one; here of the clients' models, as in Sec. 4.
Of ε and min_samples no values are given: half the distance that nine tenths of all pairs are within, and 2. Noise is
not spoken of: it joins the cluster that is nearest on average, and where there is no cluster at all, there is one. One
client of one cluster would be one client of all: with a single cluster `select.take=one` takes a share.

Deviation: "in turn" is a line in which whoever was chosen stands last: with everybody there it is the cyclic schedule,
and whoever is away holds up nobody. Who was silent in the first round, or comes later, trains the first model once,
joins the cluster nearest to its last layer by the rule for noise, and is averaged in from then on. Who has no rows is
in no cluster. Both are served the ensemble until they are in one.

Deviation: the largest logit says little about whose row it is: on label groups it sends half of Fashion-MNIST's rows to
the wrong model. `serve.rule=density` asks instead where a row lies: the mean of the first round (line 8, which the
paper computes and does not use) describes rows by what its ReLUs give, members tell once how many rows of each class
they have, and the sums of features and of their products, and every cluster is a mixture of Gaussians around its
classes. The largest logit counts beside the log density with `serve.trust`. Members' labels are then known to the
server; `serve.mask=read` shows that it can read much of it anyway, from the biases of the first round. Where members of
a cluster have left before they told, the largest logit answers for all.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "last-layer", "cluster": "dbscan", "select": "turns", "serve": "confidence"}


def fce(setting: Setting) -> Method:
    return compose(setting, "fce", PIECES)
