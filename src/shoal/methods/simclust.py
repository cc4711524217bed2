"""SimClust: clients with similar labels are clustered once, and every cohort has some clients of each cluster.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods (2025), Sec.
III-A.

| paper | here |
|---|---|
| p_l, label distribution (Eq. 4: with noise) | `client.histogram.LabelHistogram` (`represent.noise_scale`) |
| G groups by k-means with symmetrised KL | `cluster.num_clusters`: `clusterers.SimilarClusters` |
| K clients: one of each of K groups, or K/G of each | `--cohort`: `selectors.clusters.one_of_each` |
| Eq. 2, over the selected clients | `stages.train.TrainAndAggregate` |

Deviations from the paper
-------------------------
- Number of clusters: it is the size of the cohort unless it is given. The paper tries several and reports the best.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "labels", "cluster": "similar", "select": "one-of-each"}


def simclust(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "simclust", PIECES)
