"""Smallest compositions: one piece and the pieces that it requires."""

from __future__ import annotations

from shoal.methods.composition.fit import find_piece_classes, misfits
from shoal.methods.composition.piece import default_piece_names


def smallest_composition(step: str, name: str) -> dict[str, str]:
    """Returns the piece and the pieces that it requires, or an empty dict if no registered pieces fit it."""
    return _add_required_pieces({step: name}) or {}


def _add_required_pieces(steps: dict[str, str]) -> dict[str, str] | None:
    chosen = find_piece_classes(default_piece_names() | steps)
    misfit = next(misfits(chosen), None)
    if misfit is None:
        return steps
    for other, name in misfit.remedies:
        if other not in steps and (completed := _add_required_pieces({**steps, other: name})):
            return completed
    return None
