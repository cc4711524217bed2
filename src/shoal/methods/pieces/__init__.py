"""What can stand at each step of a method: a file per step, a table of pieces in each."""

from shoal.methods.composition.builder import Piece
from shoal.methods.pieces import aggregate, cluster, personalise, represent, select, serve, train

PIECES: dict[str, dict[str, Piece]] = {
    "represent": represent.PIECES,
    "cluster": cluster.PIECES,
    "select": select.PIECES,
    "train": train.PIECES,
    "aggregate": aggregate.PIECES,
    "personalise": personalise.PIECES,
    "serve": serve.PIECES,
}

# by the numbers under which pieces name them
PAPERS = {
    "000": "FedEPC",
    "001": "SCMoE-PFL",
    "002": "SimClust and RepClust",
    "003": "APCSMA",
    "004": "FedClusterEnsemble",
}

__all__ = ["PAPERS", "PIECES"]
