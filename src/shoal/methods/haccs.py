"""HACCS: clients are clustered by labels, clusters are drawn by loss and speed, and their fastest clients train.

Wolfrath, Sreekumar, Kumar, Wang, Chandra, HACCS: heterogeneity-aware clustered client selection for accelerated
federated learning, IPDPS 2022; a baseline of FedEPC (Tang et al. 2025).

| paper | here |
|---|---|
| P(y), a summary of the labels, optionally with noise | `client.histogram.LabelHistogram` (`represent.noise_scale`) |
| OPTICS on Hellinger distances, each noise point a cluster | `cluster.radius`: `stages.cluster.HellingerOptics` |
| rho, cluster weights, the devices of least latency | `select.rho`: `stages.fastest.SelectFastest` |
| k devices per round | `--cohort` |
| one model, federated averaging | `stages.train.TrainAndAggregate` |

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The table follows its abstract and the published code
  (github.com/NS-PhD-Research/HACCS).
- Radius: the published code compares P(y) by the Euclidean distance, has the Hellinger distance beside it, and cuts at
  0.25. Here 0.25 is a Hellinger distance, so the number is the same and the cut is not (`cluster.radius`).
- Summaries: the second one of the paper, histograms of the inputs given a label, is left out, because it needs bins
  that fit the data.
- Noise: the paper adds Laplace noise to counts. Here it is the Gaussian noise of all label distributions, with its ε in
  `result.json`.
- Loss: it is the loss that a client reported after its last training, which costs nothing. The published code measures
  the test error of all clients after every round.
- Latency: it is a client's number of samples divided by the speed of its hardware (`--devices`).
"""

from __future__ import annotations

from shoal.client.histogram import LabelHistogram
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.cluster import FormClusters, HellingerOptics
from shoal.stages.fastest import SelectFastest
from shoal.stages.query import QueryClients
from shoal.types import Method


def haccs(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    query_labels = QueryClients(
        setting.make("represent", LabelHistogram, ("rerelease_threshold",), num_classes=setting.model.num_classes)
    )
    form_clusters = FormClusters(setting.make("cluster", HellingerOptics), column="labels")
    select = setting.make("select", SelectFastest)
    return one_model_method(setting, "haccs", query_labels, form_clusters, select, remember="summary")
