"""Adds the selection of the cohort to a method, and names the columns by which a piece can select clients.

A column is called with the server's state and returns a value for every client in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.stages.cluster import CLUSTER_STAGE
from shoal.stages.select import SelectByFunction
from shoal.types import ClientId, ServerState

SELECTION_CLUSTERS = ClientColumn("group", stage=CLUSTER_STAGE)  # for a piece that requires CLUSTERS_TO_SELECT_FROM
UPDATE_LOSSES = ClientColumn("loss", stage="train")  # requires UPDATE_SUMMARIES or TRAINING_METRICS
UPDATE_NORMS = ClientColumn("norm", stage="train")  # requires UPDATE_SUMMARIES
TRAINING_ACCURACIES = ClientColumn("accuracy", stage="train")  # requires TRAINING_METRICS


def select_clients(method: MethodBuilder, choose: Callable[[ServerState, int], Iterable[ClientId]]) -> None:
    """Lets `choose` select the cohort of every round.

    Parameters
    ----------
    method : MethodBuilder
        The method that is built.
    choose : callable
        Returns the selected clients of `state.roster`, in any order, given the server's state and a seed. It returns
        `state.cohort_size` clients, unless the piece sets the number of clients itself.
    """
    method.stages["select"].append(SelectByFunction(choose))
