"""HACCS: clients with alike labels are grouped; groups are drawn by loss and speed, and the fastest of each train.

Wolfrath, Sreekumar, Kumar, Wang, Chandra, HACCS: heterogeneity-aware clustered client selection for accelerated
federated learning, IPDPS 2022; a baseline of paper 000.

| original | here |
|---|---|
| P(y), a summary of the labels, with noise if asked | `client.histogram.LabelHistogram` (`represent.gamma`) |
| OPTICS on Hellinger distances; noise points are clusters of their own | `cluster.reach`: `stages.cluster.Dense` |
| rho, cluster weights, the devices of least latency | `select.rho`: `stages.fastest.Fastest` |
| k devices per round | `--cohort` |
| one model, federated averaging | `stages.train.Federate` |

Deviation: the paper's text was not at hand; abstract and published code were (github.com/NS-PhD-Research/HACCS). That
code compares P(y) by Euclidean distance, with the Hellinger distance beside it, and cuts at 0.25. Here 0.25 is
a Hellinger distance: the number is theirs, the cut is not (`cluster.reach`).

Deviation: its second summary, histograms of the inputs given a label, is left out: it needs bins that fit the data.
Its noise is Laplace's on counts; here it is that of all label distributions, Gaussian, with the ε in `result.json`.

Deviation: a loss is what a client reported when it last trained, which costs nothing; the published code measures the
test error of everybody after every round. Latency is a client's rows over the speed of its hardware (`--devices`).
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
    ask = QueryClients(setting.make("represent", LabelHistogram, ("anew",), classes=setting.model.num_classes))
    form_clusters = FormClusters(setting.make("cluster", HellingerOptics), column="labels")
    choose = setting.make("select", SelectFastest)
    return one_model_method(setting, "haccs", ask, form_clusters, choose, remember="summary")
