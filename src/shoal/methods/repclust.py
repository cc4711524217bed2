"""RepClust: clients are divided once into clusters with mixed labels, and every cohort consists of whole clusters.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods (2025), Sec.
III-B.

| paper | here |
|---|---|
| p_l, label distribution (Eq. 4: with noise) | `client.histogram.LabelHistogram` (`represent.noise_scale`) |
| Eq. 3, Algorithm 1, G groups, S searched | `clusterers.RepulsiveClusters`: `cluster.num_clusters`, `.num_searched` |
| one whole cluster is selected | `selectors.clusters.whole_clusters`: clusters until there are K clients |
| Eq. 2, over the selected clients | `stages.train.TrainAndAggregate` |

Deviations from the paper
-------------------------
- Cohort: the paper's baselines select exactly K clients. So whole clusters are drawn until there are K clients, and the
  last cluster is cut.
- Sizes: where G does not divide the number of clients, the sizes of clusters differ by one.
- Swaps: `cluster.swaps=all` searches all pairs. Algorithm 1 alone finds mixed clusters only while these are no larger
  than the number of kinds of clients.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "labels", "cluster": "repulsive", "select": "whole-clusters"}


def repclust(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "repclust", PIECES)
