"""Round-robin selection in every cluster, as in FedClusterEnsemble."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTER_MODELS
from shoal.methods.composition.piece import Piece, register
from shoal.stages.select import SelectRoundRobin


@register("select", "turns")
class RoundRobin(Piece):
    """Selects a fraction of every cluster, or one client of it, in turn."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 2, lines 18-21, and Sec. 4"
    requires = (CLUSTER_MODELS,)
    requires_reason = "the members of clusters take turns"
    remark = (
        "select.per_cluster and select.cluster_fraction set how many clients of each cluster train in a round. "
        "The cohort size has no effect."
    )

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(method.setting.make("select", SelectRoundRobin))
        method.uses_cohort_size = False
