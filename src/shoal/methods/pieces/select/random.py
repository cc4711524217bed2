"""Random clients."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.piece import Piece, register
from shoal.methods.fedavg import select_at_random


@register("select", "random")
class RandomClients(Piece):
    """Random clients, each with the same probability or in proportion to its number of samples."""

    is_default = True
    source = "McMahan et al. 2017"

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"] += select_at_random(method.setting)
