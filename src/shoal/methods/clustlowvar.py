"""ClustLowVar: one client from each of K urns of clients with similar updates, so that the average varies less.

Fraboni, Vidal, Kameni, Lorenzi, Clustered sampling: low-variance and improved representativity for clients selection
in federated learning, ICML 2021, Algorithm 2; a baseline of paper 002.

| paper | here |
|---|---|
| representative gradients | the last update that each client sent; unknown ones are alike |
| K urns by Ward's tree, filled by sizes | `selectors.urns.distributions` |
| one client of each, weight 1/K | `stages.update_selection.Urns`, `train.weighting=uniform` |
"""

from __future__ import annotations

from shoal.client.size import SendSampleCount
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.query import QueryClients
from shoal.stages.select import SIZE_STAGE
from shoal.stages.update_selection import SelectFromUrns
from shoal.types import Method


def clustlowvar(setting: Setting) -> Method:
    ask = QueryClients(SendSampleCount(), name=SIZE_STAGE)
    return one_model_method(setting, "clustlowvar", ask, SelectFromUrns(), remember="update", weighting="uniform")
