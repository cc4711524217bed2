"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from shoal.errors import UserError
from shoal.rng import generator
from shoal.stages.base import ServerOnly
from shoal.types import FIXED, POOL, ClientId, Report, ServerState


@dataclass(frozen=True)
class Uniform(ServerOnly):
    """`size` clients, every set of that size equally likely; a smaller roster takes part whole."""

    size: int = field(metadata=FIXED)  # of the run: --cohort
    name: str = "select"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"cohort is {self.size}; it must be 1 client or more")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        order = torch.randperm(len(state.roster), generator=generator(seed))[: self.size]
        return replace(state, cohort=tuple(state.roster[i] for i in sorted(order.tolist())))


@dataclass(frozen=True)
class Pooled(ServerOnly):
    """The one who holds everybody's data: what federation gives up."""

    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        return replace(state, cohort=(POOL,))
