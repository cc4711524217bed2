"""FedClusterEnsemble: clusters train separately, members take turns, and unseen clients use the most confident model.

Freitas, Akabane, Estrella, FedClusterEnsemble: Enhancing clustered federated learning through confidence-based
ensembles and cyclic intra cluster client selection.

| paper | here |
|---|---|
| round 1: all clients train w_0 (Alg. 2, 4-6) | `stages.select.SelectRoundRobin`: all clients without a cluster |
| DBSCAN on last layers (9-10): ε, min_samples | `cluster.radius`, `cluster.min_size`: `clusterers.NeighbourClusters` |
| w_m, weighted by samples (13-14) | `stages.first_round_clusters`, `stages.train.TrainAndAggregate` |
| one client of each cluster in turn (18-21) | `select.per_cluster=one`: w_m is that client's model, bit for bit |
| 70 % of each cluster in turn (Sec. 4, item 4) | `select.per_cluster=fraction`, `select.cluster_fraction` |
| confidence (Alg. 3) | `serve.rule=logit`: `client.confidence.Confidence` |
| client updates (Eq. 4) | `train.updates` of a round, `num_client_updates` of the result |

`--cohort` has no effect: the options of `select` set how many clients train in a round.

Deviations from the paper
-------------------------
- DBSCAN input: line 9 of Alg. 2 takes the last layer of the mean model, of which there is only one. Here the last
  layers of the clients' models are clustered, as in Sec. 4.
- DBSCAN parameters: the paper gives no values of ε and min_samples. Here ε is half the distance that 90 % of all pairs
  are within, and min_samples is 2.
- Noise: the paper does not mention it. Here a noise client joins the cluster that is nearest on average. If there is no
  cluster at all, all clients form one.
- Single cluster: one client of each cluster would be one client in all. With a single cluster `select.per_cluster=one`
  selects the fraction `select.cluster_fraction` of it.
- Turns: the members of a cluster stand in a line, and a selected client moves to its end. With all clients present this
  is the cyclic schedule of the paper, and an absent client does not delay the others.
- Clients without a report in the first round, and late-joining clients: they train the first model once, join the
  cluster nearest to its last layer by the rule for noise, and are averaged into its model from then on. Until then they
  are served the ensemble.
- Clients without samples: they are in no cluster and are served the ensemble.
- Density rule: `serve.rule=density` is an addition, because the largest logit says little about the cluster to which a
  sample belongs. The mean model of the first round (line 8, which the paper computes and does not use) describes
  samples by its ReLU outputs. Members report once their label counts and the sums of features and of products of
  features. Every cluster is then a mixture of Gaussians around its classes, and the largest logit is added to the log
  density with the weight `serve.logit_weight`. The server learns the label counts of the members. `serve.mask=inferred`
  shows that it can infer most of them anyway, from the biases of the first round. If members of a cluster left the run
  before they reported, the largest logit decides for all clusters.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "last-layer", "cluster": "dbscan", "select": "turns", "serve": "confidence"}


def fce(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "fce", PIECES)
