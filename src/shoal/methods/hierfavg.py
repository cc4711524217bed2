"""HierFAVG: edges average their clients' models, a cloud averages those of the edges less often.

Liu, Zhang, Song, Letaief, Client-edge-cloud hierarchical federated learning, ICC 2020; a baseline of paper 003.

| original | here |
|---|---|
| L edges, each with its own clients | `--edges` (5, by chance); `--edge-column` |
| κ1 local updates before an edge averages | `train.epochs`: counted in passes over a client's rows |
| κ2 edge averages before the cloud averages | `--cloud-every` (5) |
| weights by rows, at the edge and in the cloud | `stages.train.Federate`, `stages.edges.Cloud` |

It is FedAvg under edges, with the edges that the user names or, without a word, five: `fedavg --edges 5` is the same.

Deviation: in the original every client of an edge trains; here an edge has its share of `--cohort`. `--cohort 1.0` is
the original.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import fedavg
from shoal.stages.edges import Topology
from shoal.types import Method


def hierfavg(setting: Setting) -> Method:
    setting.request_edges(Topology())
    return replace(fedavg(setting), name="hierfavg")
