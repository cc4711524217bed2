"""RepClust: clients are dealt once into groups that are mixed within and alike; every round takes whole groups.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods (paper 002),
Sec. III-B.

| paper | here |
|---|---|
| p_l, label distribution (Eq. 4: with noise) | `client.histogram.LabelHistogram` (`represent.gamma`) |
| Eq. 3 and Algorithm 1, G groups, S searched | `cluster.groups`, `cluster.top`: `clusterers.RepulsiveClusters` |
| one whole group takes part | `selectors.groups.whole_groups`: groups until there are K clients |
| Eq. 2, over the selected clients | `stages.train.Federate` |

Deviation: the paper's baselines take exactly K clients, so whole groups are drawn until there are K and the last is
cut. Where G does not divide the number of clients, sizes differ by one. `cluster.swaps=all` searches all pairs:
Algorithm 1 alone finds mixed groups only while these are no larger than the number of kinds of clients.
"""

from __future__ import annotations

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import Method

PIECES = {"represent": "labels", "cluster": "repulsive", "select": "whole-groups"}


def repclust(setting: Setting) -> Method:
    return compose(setting, "repclust", PIECES)
