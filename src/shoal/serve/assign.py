"""Which cluster somebody belongs to, by what it tells of itself, where a run's state can say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from shoal.client_table import Table
from shoal.errors import UserError
from shoal.serve.inputs import Unfit
from shoal.stages.capability_clusters import Semantic
from shoal.stages.coldstart import GroupColdStart
from shoal.stages.experts import Experts
from shoal.stages.overlapping import Overlapping
from shoal.types import Method, ServerState

Floats = NDArray[np.float64]


class NoClusters(UserError):
    """The method has none, or none yet, that a vector could be compared with."""


def memberships(method: Method, state: ServerState, representation: Any) -> dict[str, float]:
    """The weight of each cluster's model, by the rule of the method's own stage; they sum to 1."""
    for stage in method.stages:
        match stage:
            case Experts():
                weights = _like_members(stage, state, representation)
            case GroupColdStart():
                weights = _same_way(state.memory.get(stage.name, {}).get("directions"), representation)
            case Overlapping():
                weights = _same_way(_mean_directions(stage, state), representation)
            case Semantic():
                weights = _fuzzy(stage, state, representation)
            case _:
                continue
        return dict(zip(sorted(state.models), weights.tolist(), strict=True))
    raise NoClusters(
        f"method {method.name} keeps no representations of clusters; those that do are fedepc, fedgroup, scmoe "
        "and clsm-fl"
    )


def _vector(representation: Any, width: int) -> Floats:
    if _has_truth_values(representation):  # numpy would take them for 1 and 0
        raise Unfit("representation", "representation: true and false are no numbers; all values must be numbers")
    try:
        found = np.asarray(representation, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise Unfit("representation", "representation: it must be an array of numbers") from None
    if len(found) != width:
        raise Unfit("representation", f"representation: it has {len(found)} numbers, but must have {width}")
    if not np.isfinite(found).all() or np.abs(found).max(initial=0) > 1e30:
        raise Unfit("representation", "representation: a number is not finite, or beyond 1e30")
    return found


def _has_truth_values(values: Any) -> bool:
    return any(map(_has_truth_values, values)) if isinstance(values, list) else isinstance(values, bool)


def _like_members(stage: Experts, state: ServerState, representation: Any) -> Floats:
    """As newcomers join: FedEPC's four sparsity vectors."""
    known = Table.load(state, stage.name)
    if not len(known):
        raise NoClusters("no clusters have been formed yet; ask again after a few rounds")
    rows = known["rows"].double().numpy()
    vector = _vector(representation, rows.shape[1])
    if stage.column == "sparsity" and not ((vector >= 0) & (vector <= 1)).all():
        raise Unfit("representation", "representation: shares of zeros must lie between 0 and 1")
    label = int(stage.rule.join(rows, known["expert"].numpy(), vector[None])[0])
    return np.eye(len(state.models))[label]


def _same_way(directions: torch.Tensor | None, representation: Any) -> Floats:
    """All of it to the cluster whose direction has the largest cosine."""
    if directions is None:
        raise NoClusters("no clusters have been formed yet; ask again after a few rounds")
    update = torch.from_numpy(_vector(representation, directions.shape[1]))
    cosines = F.normalize(directions.double(), dim=1) @ F.normalize(update, dim=0)
    return np.eye(len(directions))[int(cosines.argmax())]


def _mean_directions(stage: Overlapping, state: ServerState) -> torch.Tensor | None:
    known = Table.load(state, stage.name)
    inside = [c for c in known.clients if c in state.membership]
    if not inside:
        return None
    weights = torch.stack([state.membership[c] for c in inside]).double()  # [clients, clusters]
    rows = known["direction"].double()[[known.clients.index(c) for c in inside]]
    return weights.T @ rows


def _fuzzy(stage: Semantic, state: ServerState, representation: Any) -> Floats:
    """Fuzzy c-means: a share of each cluster, the larger the nearer its centre."""
    centres = state.memory.get(stage.name, {}).get("centres")
    if centres is None:
        raise NoClusters("no clusters have been formed yet; ask again after a few rounds")
    vector = _vector(representation, centres.shape[1])
    distances = np.maximum(np.linalg.norm(centres.double().numpy() - vector, axis=1), 1e-12)
    shares = (distances.min() / distances) ** (2 / (stage.rule.fuzziness - 1))
    return np.asarray(shares / shares.sum(), dtype=np.float64)
