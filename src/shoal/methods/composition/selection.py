"""The cohort of a round: a piece says which clients, and `select_clients` does the rest. What it may know of clients
are columns, which are called with the server's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.stages.cluster import CLUSTER_STAGE
from shoal.stages.select import SelectByFunction
from shoal.types import ClientId, ServerState

SELECTION_CLUSTERS = ClientColumn("group", stage=CLUSTER_STAGE)  # for a piece that needs GROUPS_TO_SELECT_FROM
UPDATE_LOSSES = ClientColumn("loss", stage="train")  # UPDATE_SUMMARIES or TRAINING_METRICS
UPDATE_NORMS = ClientColumn("norm", stage="train")  # UPDATE_SUMMARIES
TRAINING_ACCURACIES = ClientColumn("accuracy", stage="train")  # TRAINING_METRICS


def select_clients(method: MethodBuilder, choose: Callable[[ServerState, int], Iterable[ClientId]]) -> None:
    """In every round the cohort is what `choose` returns for the server's state and a seed: clients of `state.roster`,
    in any order, `state.cohort_size` of them where the piece goes by it."""
    method.stages["select"].append(SelectByFunction(choose))
