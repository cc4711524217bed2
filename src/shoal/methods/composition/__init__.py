"""The names with which users write their own pieces. docs/own-piece.md shows how. Capabilities are in `capability`."""

from shoal.methods.composition.aggregation import average_models
from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.methods.composition.client_training import set_training
from shoal.methods.composition.clusters import form_clusters, form_selection_clusters
from shoal.methods.composition.label_prior import label_distributions
from shoal.methods.composition.piece import Piece, register
from shoal.methods.composition.selection import (
    SELECTION_CLUSTERS,
    TRAINING_ACCURACIES,
    UPDATE_LOSSES,
    UPDATE_NORMS,
    select_clients,
)
from shoal.types import option

__all__ = [
    "SELECTION_CLUSTERS",
    "TRAINING_ACCURACIES",
    "UPDATE_LOSSES",
    "UPDATE_NORMS",
    "ClientColumn",
    "MethodBuilder",
    "Piece",
    "average_models",
    "form_clusters",
    "form_selection_clusters",
    "label_distributions",
    "option",
    "register",
    "select_clients",
    "set_training",
]
