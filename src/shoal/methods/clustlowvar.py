"""ClustLowVar: each round draws one client from each of K urns of clients with similar updates.

Fraboni, Vidal, Kameni, Lorenzi, Clustered sampling: low-variance and improved representativity for clients selection in
federated learning, ICML 2021, Algorithm 2; a baseline of Pereira et al. 2025.

| paper | here |
|---|---|
| representative gradients | the last update of each client; clients without an update count as equal |
| K urns by Ward's tree, filled by sizes | `selectors.urns.urn_distributions` |
| one client of each urn, weight 1/K | `stages.update_selection.SelectFromUrns`, `train.weighting=uniform` |
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
    """Builds the method with the options of the setting."""
    query_sizes = QueryClients(SendSampleCount(), name=SIZE_STAGE)
    return one_model_method(
        setting, "clustlowvar", query_sizes, SelectFromUrns(), remember="update", weighting="uniform"
    )
