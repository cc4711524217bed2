"""The cohort of a round: a piece says which clients, and `select_clients` does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.methods.composition.builder import MethodBuilder
from shoal.stages.select import SelectBy
from shoal.types import ClientId, ServerState


def select_clients(method: MethodBuilder, choose: Callable[[ServerState, int], Iterable[ClientId]]) -> None:
    """In every round the cohort is what `choose` returns for the server's state and a seed: clients of `state.roster`,
    in any order, `state.cohort_size` of them where the piece goes by it."""
    method.stages["select"].append(SelectBy(choose))
