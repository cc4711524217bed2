"""The clusters that a client belongs to, by a representation that it computed itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.serve.inputs import InvalidInput
from shoal.types import Method, ServerState

Floats = NDArray[np.float64]


class NoClusters(UserError):
    """The method has none, or none yet, that a vector could be compared with."""


def cluster_memberships(method: Method, state: ServerState, representation: Any) -> dict[str, float]:
    """The weight of each cluster's model, by the rule of the method's own clusters; they sum to 1."""
    if method.cluster_assigner is None:
        raise NoClusters(f"method {method.name} keeps no representations of clusters that one could be compared with")
    width = method.cluster_assigner.representation_width(state)
    if width is None:
        raise NoClusters("no clusters have been formed yet; ask again after a few rounds")
    vector = _parse_vector(representation, width, method.cluster_assigner.representation_bounds)
    weights = method.cluster_assigner.cluster_weights(state, vector)
    return dict(zip(sorted(state.models), weights.tolist(), strict=True))


def _parse_vector(representation: Any, width: int, bounds: tuple[float, float]) -> Floats:
    if _has_truth_values(representation):  # numpy would take them for 1 and 0
        raise InvalidInput(
            "representation", "representation: true and false are no numbers; all values must be numbers"
        )
    try:
        found = np.asarray(representation, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput("representation", "representation: it must be an array of numbers") from None
    if len(found) != width:
        raise InvalidInput("representation", f"representation: it has {len(found)} numbers, but must have {width}")
    if not np.isfinite(found).all() or np.abs(found).max(initial=0) > 1e30:
        raise InvalidInput("representation", "representation: a number is not finite, or beyond 1e30")
    low, high = bounds
    if not ((found >= low) & (found <= high)).all():
        raise InvalidInput("representation", f"representation: all numbers must lie between {low:g} and {high:g}")
    return found


def _has_truth_values(values: Any) -> bool:
    return any(map(_has_truth_values, values)) if isinstance(values, list) else isinstance(values, bool)
