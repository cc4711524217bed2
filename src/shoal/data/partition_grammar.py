"""How a partition is written: one base and any number of shifts, `dirichlet:0.3+rotate:0,90`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import UserError


@dataclass(frozen=True)
class Term:
    """`name` or `name:argument`."""

    name: str
    argument: str
    example: str

    def wrong(self, reason: str) -> UserError:
        text = f"{self.name}:{self.argument}" if self.argument else self.name
        return UserError(f"partition {text!r}: {reason}, as in {self.example}")

    def no_argument(self) -> None:
        if self.argument:
            raise self.wrong("it takes no argument")

    def numbers(self) -> list[float]:
        try:
            values = [float(part) for part in self.argument.split(",")]
        except ValueError as error:
            raise self.wrong("what follows the colon must be numbers with commas between") from error
        if not all(math.isfinite(value) for value in values):
            raise self.wrong("numbers must be finite")
        return values

    def exactly(self, *names: str) -> list[float]:
        """One number for each name."""
        wanted = f"it needs {len(names)} number(s), {', '.join(names)}"
        if not self.argument:
            raise self.wrong(wanted)
        values = self.numbers()
        if len(values) != len(names):
            raise self.wrong(f"{wanted}, but has {len(values)}")
        return values

    def positive(self, name: str, value: float) -> float:
        if value <= 0:
            raise self.wrong(f"{name} is {value:g} but must be above 0")
        return value

    def whole(self, name: str, value: float) -> int:
        if value != int(value) or value < 1:
            raise self.wrong(f"{name} is {value:g} but must be a whole number from 1 on")
        return int(value)

    def share(self) -> float:
        (value,) = self.exactly("SHARE")
        if not 0 <= value <= 1:
            raise self.wrong(f"SHARE is {value:g} but must lie between 0 and 1")
        return value


def parse(spec: str, bases: Mapping[str, str], shifts: Mapping[str, str]) -> tuple[Term, list[Term]]:
    """The base and the shifts; `bases` and `shifts` map the known names to an example of each."""
    first, *rest = (part.strip() for part in spec.split("+"))
    return _term(spec, first, bases, "base"), [_term(spec, part, shifts, "shift") for part in rest]


def _term(spec: str, text: str, known: Mapping[str, str], kind: str) -> Term:
    name, _, argument = text.partition(":")
    if name not in known:
        raise UserError(f"partition {spec!r}: {name!r} is not a {kind}; write one of {', '.join(known.values())}")
    return Term(name, argument.strip(), known[name])
