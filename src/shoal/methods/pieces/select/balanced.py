"""Selection of the cohort with the flattest label distribution."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import LABEL_DISTRIBUTIONS
from shoal.methods.composition.label_prior import ensure_label_stage
from shoal.methods.composition.piece import Piece, register
from shoal.stages.balanced import SelectBalanced


@register("select", "balanced")
class BalancedCohort(Piece):
    """Selects the clients that have waited longest, and others that make the cohort's label distribution flat."""

    source = "shoal"
    uses = (LABEL_DISTRIBUTIONS,)
    client_sends = "its label distribution"
    server_learns = "the label distribution of every client"

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"].append(method.setting.make("select", SelectBalanced, source=ensure_label_stage(method)))
