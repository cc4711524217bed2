"""Members of every cluster in turn, as FedClusterEnsemble selects them."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import CLUSTER_MODELS
from shoal.methods.composition.piece import Piece, register
from shoal.stages.select import SelectRoundRobin


@register("select", "turns")
class RoundRobin(Piece):
    """A share of every cluster, or one client of it, in turn."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 2, lines 18-21, and Sec. 4"
    requires = (CLUSTER_MODELS,)
    requires_reason = "the members of clusters take turns"
    remark = "select.take and select.share say how many clients of each cluster take part, not the cohort size."

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(method.setting.make("select", SelectRoundRobin))
        method.uses_cohort_size = False
