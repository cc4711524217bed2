"""Assigns a client to clusters by a representation that the client has computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.serve.inputs import InvalidInput
from shoal.types import Method, ServerState

Floats = NDArray[np.float64]


class NoClusters(UserError):
    """The method has no clusters that a representation can be compared with, or has not formed them yet."""


def cluster_memberships(method: Method, state: ServerState, representation: Any) -> dict[str, float]:
    """Returns the weight of each cluster by the rule of the method. The weights sum to 1.

    Raises `NoClusters` if there are no clusters to compare with, and `InvalidInput` for a bad representation.
    """
    if method.cluster_assigner is None:
        raise NoClusters(f"method is {method.name}, which has no representations of clusters to compare with.")
    width = method.cluster_assigner.representation_width(state)
    if width is None:
        raise NoClusters("The method has not formed clusters yet. Send the request again after a few rounds.")
    vector = _parse_vector(representation, width, method.cluster_assigner.representation_bounds)
    weights = method.cluster_assigner.cluster_weights(state, vector)
    return dict(zip(sorted(state.models), weights.tolist(), strict=True))


def _parse_vector(representation: Any, width: int, bounds: tuple[float, float]) -> Floats:
    if _has_truth_values(representation):  # numpy would convert them to 1 and 0
        raise InvalidInput("representation", "representation has true or false. All values must be numbers.")
    try:
        vector = np.asarray(representation, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput("representation", "representation must be an array of numbers.") from None
    if len(vector) != width:
        raise InvalidInput("representation", f"representation has {len(vector)} numbers. It must have {width}.")
    if not np.isfinite(vector).all() or np.abs(vector).max(initial=0) > 1e30:
        raise InvalidInput("representation", "representation has a number that is not finite or above 1e30.")
    low, high = bounds
    if not ((vector >= low) & (vector <= high)).all():
        raise InvalidInput("representation", f"representation has a number that is not between {low:g} and {high:g}.")
    return vector


def _has_truth_values(values: Any) -> bool:
    return any(map(_has_truth_values, values)) if isinstance(values, list) else isinstance(values, bool)
