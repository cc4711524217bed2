"""Checks which pieces fit together: every required capability must be provided, and must-be-used ones must be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import UserError
from shoal.methods.composition.capability import Capability
from shoal.methods.composition.piece import STEPS, Piece, piece_class, pieces

PiecesByStep = Mapping[str, tuple[type[Piece], ...]]  # step -> its pieces; only serve may have several


@dataclass(frozen=True)
class Misfit:
    """A reason why pieces do not fit together, and the pieces that would resolve it."""

    piece: type[Piece]
    reason: str
    remedies: tuple[tuple[str, str], ...]  # step and name

    @property
    def sentence(self) -> str:
        """Returns the reason and the remedies as an error message."""
        names = [f"{step}={name}" for step, name in self.remedies]
        alternatives = f"{', '.join(names[:-1])}{' or ' if len(names) > 1 else ''}{names[-1]}" if names else ""
        return f"{self.piece.step}={self.piece.name} {self.reason}{f'; use {alternatives}' if alternatives else ''}"


def find_piece_classes(steps: Mapping[str, str]) -> dict[str, tuple[type[Piece], ...]]:
    """Returns the classes of the named pieces by step. Several pieces of a step are joined by `+`."""
    return {step: tuple(piece_class(step, name) for name in steps[step].split("+")) for step in STEPS}


def provides(pieces_by_step: PiecesByStep, capability: Capability) -> bool:
    """Returns whether one of the pieces provides the capability."""
    return any(capability in piece.provides for classes in pieces_by_step.values() for piece in classes)


def misfits(pieces_by_step: PiecesByStep) -> Iterator[Misfit]:
    """Yields every reason why the pieces do not fit together."""
    for piece in (piece for classes in pieces_by_step.values() for piece in classes):
        yield from (
            missing_capability(pieces_by_step, piece, c) for c in piece.requires if not provides(pieces_by_step, c)
        )
        if piece.must_be_used and not any(_is_used(pieces_by_step, piece, c) for c in piece.must_be_used):
            names = " or ".join(capability.name for capability in piece.must_be_used)
            yield Misfit(
                piece, f"has no effect, because no other piece of the method uses {names}", _pieces_that_use(piece)
            )


def missing_capability(
    pieces_by_step: PiecesByStep, piece: type[Piece], capability: Capability, reason: str = ""
) -> Misfit:
    """Returns the misfit of a piece whose required capability no piece of the method provides."""
    remedies = tuple((s, n) for s, classes in pieces().items() for n, p in classes.items() if capability in p.provides)
    steps = dict.fromkeys(step for step, _ in remedies)
    instead = " and ".join(f"{step}={_join_names(pieces_by_step[step])}" for step in steps)
    without = f", which {instead} does not provide" if instead else ""
    reason_text = f" ({reason or piece.requires_reason})" if reason or piece.requires_reason else ""
    return Misfit(piece, f"needs {capability.name}{without}{reason_text}", remedies)


def refuse_misfits(pieces_by_step: PiecesByStep) -> None:
    """Raises `UserError` with the first reason why the pieces do not fit together."""
    for misfit in misfits(pieces_by_step):
        raise UserError(misfit.sentence)


def _is_used(pieces_by_step: PiecesByStep, piece: type[Piece], capability: Capability) -> bool:
    others = (p for classes in pieces_by_step.values() for p in classes if p is not piece)
    return any(capability in (*other.requires, *other.uses) for other in others)


def _pieces_that_use(piece: type[Piece]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (step, name)
        for step, classes in pieces().items()
        for name, other in classes.items()
        if step != piece.step and any(c in (*other.requires, *other.uses) for c in piece.must_be_used)
    )


def _join_names(piece_classes: Sequence[type[Piece]]) -> str:
    return "+".join(piece.name for piece in piece_classes)
