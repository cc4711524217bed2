"""Random clients."""

from __future__ import annotations

from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.piece import Piece, register
from shoal.methods.fedavg import by_chance


@register("select", "random")
class RandomClients(Piece):
    """Random clients, each with the same probability or in proportion to its number of samples."""

    default = True
    source = "McMahan et al. 2017"

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["select"] += by_chance(method.setting)
