"""HierFAVG: edge servers average the models of their clients, and a cloud averages the edge models less often.

Liu, Zhang, Song, Letaief, Client-edge-cloud hierarchical federated learning, ICC 2020. It is a
baseline of APCSMA (Ma et al. 2024).

| paper | here |
|---|---|
| L edges, each with its own clients | `--edges` (5 random edges by default); `--edge-column` |
| κ1 local updates before an edge averages | `train.epochs`: counted in epochs over a client's samples |
| κ2 edge averages before the cloud averages | `--cloud-every-rounds` (5) |
| weights by samples, at edge and cloud | `stages.train.TrainAndAggregate`, `stages.edges.AverageEdgeModels` |

The method is FedAvg with edges: with those that the user asks for, or with five. `fedavg --edges 5` is the same.

Deviations from the paper
-------------------------
- Cohort: in the paper all clients of an edge train. Here an edge has its share of `--cohort`. `--cohort 1.0` trains
  all.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import fedavg
from shoal.stages.edges import Topology
from shoal.types import Method


def hierfavg(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    setting.request_edges(Topology())
    return replace(fedavg(setting), name="hierfavg")
