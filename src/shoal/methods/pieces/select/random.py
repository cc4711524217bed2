"""Random selection, as in FedAvg."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.piece import Piece, register
from shoal.methods.fedavg import select_at_random


@register("select", "random")
class RandomClients(Piece):
    """Selects random clients with equal probability or in proportion to their numbers of samples."""

    is_default = True
    source = "McMahan et al. 2017"

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"] += select_at_random(method.setting)
