"""Which pieces fit together: every need is provided, and what only makes sense where it is used is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import UserError
from shoal.methods.composition.capability import Capability
from shoal.methods.composition.piece import STEPS, Piece, piece_class, pieces

Chosen = Mapping[str, tuple[type[Piece], ...]]  # step -> its pieces; only serve may have several


@dataclass(frozen=True)
class Misfit:
    """One reason why pieces do not fit together, and the pieces that would help."""

    piece: type[Piece]
    reason: str
    remedies: tuple[tuple[str, str], ...]  # step and name

    @property
    def sentence(self) -> str:
        names = [f"{step}={name}" for step, name in self.remedies]
        either = f"{', '.join(names[:-1])}{' or ' if len(names) > 1 else ''}{names[-1]}" if names else ""
        return f"{self.piece.step}={self.piece.name} {self.reason}{f'; use {either}' if either else ''}"


def chosen_classes(steps: Mapping[str, str]) -> dict[str, tuple[type[Piece], ...]]:
    """The classes of the named pieces; names of several pieces are joined by `+`."""
    return {step: tuple(piece_class(step, name) for name in steps[step].split("+")) for step in STEPS}


def provides(chosen: Chosen, capability: Capability) -> bool:
    return any(capability in piece.provides for found in chosen.values() for piece in found)


def misfits(chosen: Chosen) -> Iterator[Misfit]:
    """Everything that keeps the pieces from fitting together."""
    for piece in (piece for found in chosen.values() for piece in found):
        yield from (unprovided(chosen, piece, c) for c in piece.needs if not provides(chosen, c))
        if piece.must_be_used and not any(_is_used(chosen, piece, c) for c in piece.must_be_used):
            names = " or ".join(capability.name for capability in piece.must_be_used)
            yield Misfit(piece, f"has no effect, because no other piece of the method uses {names}", _users(piece))


def unprovided(chosen: Chosen, piece: type[Piece], capability: Capability, why: str = "") -> Misfit:
    """The piece needs a capability that no piece of the method provides."""
    remedies = tuple((s, n) for s, found in pieces().items() for n, p in found.items() if capability in p.provides)
    steps = dict.fromkeys(step for step, _ in remedies)
    instead = " and ".join(f"{step}={_joined(chosen[step])}" for step in steps)
    without = f", which {instead} does not provide" if instead else ""
    because = f" ({why or piece.because})" if why or piece.because else ""
    return Misfit(piece, f"needs {capability.name}{without}{because}", remedies)


def refuse_misfits(chosen: Chosen) -> None:
    """The first reason why pieces do not fit, as an error."""
    for misfit in misfits(chosen):
        raise UserError(misfit.sentence)


def _is_used(chosen: Chosen, piece: type[Piece], capability: Capability) -> bool:
    others = (p for found in chosen.values() for p in found if p is not piece)
    return any(capability in (*other.needs, *other.uses) for other in others)


def _users(piece: type[Piece]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (step, name)
        for step, found in pieces().items()
        for name, other in found.items()
        if step != piece.step and any(c in (*other.needs, *other.uses) for c in piece.must_be_used)
    )


def _joined(found: Sequence[type[Piece]]) -> str:
    return "+".join(piece.name for piece in found)
