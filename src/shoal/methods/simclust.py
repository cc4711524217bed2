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

from shoal.client.histogram import LabelHistogram
from shoal.methods.fedavg import averaging
from shoal.methods.setting import Setting
from shoal.selectors.groups import one_of_each
from shoal.stages.cluster import Group, Similar
from shoal.stages.represent import AskOnce
from shoal.stages.select import FromGroups
from shoal.types import Method


def simclust(s: Setting) -> Method:
    ask = AskOnce(s.make("represent", LabelHistogram, ("anew",), classes=s.model.classes))
    group = Group(s.make("cluster", Similar, cohort=s.cohort), column="labels")
    return averaging(s, "simclust", ask, group, FromGroups(one_of_each, size=s.cohort))
