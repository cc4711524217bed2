"""Adds clusters to a method: clusters with a model each, or clusters that are used for selection only.

The pieces in `methods/pieces/cluster/` give the rule that assigns clients to clusters. See docs/own-piece.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike

from shoal.clusterers.validation import number_by_first_appearance
from shoal.errors import UserError
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import FIRST_ROUND_MODELS
from shoal.methods.composition.label_prior import label_distributions
from shoal.rng import derive_seed
from shoal.stages.cluster import CLUSTER_STAGE, Clustering, Floats, FormClusters
from shoal.stages.experts import ClusterModels, VectorClusters, expert_for, named_experts
from shoal.stages.first_round_clusters import FIRST_MODEL_SLOT, FormFirstRoundClusters, cluster_or_first_model
from shoal.types import ServerState

ClusterFunction = Callable[[Floats, int], ArrayLike | Clustering]
"""Takes one vector per client and a seed below 2**32, and returns the cluster of each client. A client with the label
-1, which is noise in scikit-learn, joins the nearest cluster."""


def form_clusters(method: MethodBuilder, rule: ClusterFunction) -> None:
    """Gives every cluster that `rule` forms a model, which its members train and are served.

    A piece that calls this function requires `CLIENT_VECTORS` and provides `CLUSTER_MODELS`, `EXPERTS` and
    `ONE_MODEL_PER_CLIENT`.

    Parameters
    ----------
    method : MethodBuilder
        The method, which already has a representation of clients.
    rule : callable
        Returns the cluster of each client, given their vectors and a seed.
    """
    (piece,) = method.pieces["cluster"]

    def clustering(rows: Floats, seed: int) -> Clustering:
        labels = rule(rows, seed % 2**32)
        return labels if isinstance(labels, Clustering) else _assign_noise_clients(piece.name, rows, np.asarray(labels))

    method.use_cluster_models()
    if method.provides(FIRST_ROUND_MODELS):
        _cluster_first_models(method, clustering)
    else:
        vectors = method.vectors
        experts = ClusterModels(
            VectorClusters(clustering, vectors.num_parts), vectors.column, vectors.stage, vectors.bounds
        )
        method.stages["cluster"].append(experts)
        method.cluster_assigner = experts


def form_selection_clusters(
    method: MethodBuilder,
    rule: Callable[[Floats, int, int], ArrayLike],
    step: str = "cluster",
    stage_name: str = CLUSTER_STAGE,
) -> None:
    """Forms clusters of clients that are used for selection only and have no models.

    A piece of the cluster step that calls this function provides `CLUSTERS_TO_SELECT_FROM` and everything that
    `cluster=none` provides.

    Parameters
    ----------
    method : MethodBuilder
        The method that is built.
    rule : callable
        Returns the cluster of each client, given the label distributions of clients, a seed and the cohort size.
    step : str
        The step to which the stage is added.
    stage_name : str
        The name of the stage, which is also where it keeps the clusters.
    """
    labels = label_distributions(method)
    method.stages[step].append(FormClusters(rule, column=labels.column, source=labels.stage, name=stage_name))


def _cluster_first_models(method: MethodBuilder, rule: Callable[[Floats, int], Clustering]) -> None:
    model = method.setting.model

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        return ServerState(
            0, named_experts([model.init(first)]), memory={FIRST_MODEL_SLOT: {"seed": torch.tensor(first)}}
        )

    method.init, method.models_to_train, method.models_to_serve = init, cluster_or_first_model(model), expert_for
    method.server_updates.append(FormFirstRoundClusters(rule, model))


def _assign_noise_clients(piece_name: str, rows: Floats, labels: np.ndarray) -> Clustering:
    if labels.shape != (len(rows),) or labels.dtype.kind not in "biu":
        raise UserError(
            f"cluster={piece_name} returned {labels.dtype} labels of shape {labels.shape} for {len(rows)} clients; "
            "it must return one whole number for each client"
        )
    is_noise = labels < 0
    labels = np.where(is_noise, 0, labels)
    if is_noise.any() and not is_noise.all():
        from shoal.clusterers.neighbours import nearest_clusters

        labels[is_noise] = nearest_clusters(rows[~is_noise], labels[~is_noise], rows[is_noise])
    return Clustering(number_by_first_appearance(labels)[0], int(is_noise.sum()))
