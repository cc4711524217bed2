"""SimClust: clients with similar labels are grouped once; every round takes some of each group.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods (paper 002),
Sec. III-A.

| paper | here |
|---|---|
| p_l, label distribution (Eq. 4: with noise) | `client.histogram.LabelHistogram` (`represent.gamma`) |
| G groups by k-means with symmetrised KL | `cluster.groups`: `clusterers.SimilarClusters` |
| K clients: one of each of K groups, or K/G of each | `--cohort`: `selectors.groups.one_of_each` |
| Eq. 2, over the selected clients | `stages.train.Federate` |

Deviation: the number of groups is that of the cohort unless it is given; the paper tries several and reports the best.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "labels", "cluster": "similar", "select": "one-of-each"}


def simclust(setting: Setting) -> Method:
    return compose(setting, "simclust", PIECES)
