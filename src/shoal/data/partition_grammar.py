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

    def error(self, reason: str) -> UserError:
        text = f"{self.name}:{self.argument}" if self.argument else self.name
        return UserError(f"partition {text!r}: {reason}, as in {self.example}")

    def refuse_argument(self) -> None:
        if self.argument:
            raise self.error("it takes no argument")

    def parse_numbers(self) -> list[float]:
        try:
            values = [float(part) for part in self.argument.split(",")]
        except ValueError as error:
            raise self.error("what follows the colon must be numbers with commas between") from error
        if not all(math.isfinite(value) for value in values):
            raise self.error("numbers must be finite")
        return values

    def parse_named_numbers(self, *names: str) -> list[float]:
        """One number for each name."""
        wanted = f"it needs {len(names)} number(s), {', '.join(names)}"
        if not self.argument:
            raise self.error(wanted)
        values = self.parse_numbers()
        if len(values) != len(names):
            raise self.error(f"{wanted}, but has {len(values)}")
        return values

    def require_positive(self, name: str, value: float) -> float:
        if value <= 0:
            raise self.error(f"{name} is {value:g} but must be above 0")
        return value

    def require_whole_number(self, name: str, value: float) -> int:
        if value != int(value) or value < 1:
            raise self.error(f"{name} is {value:g} but must be a whole number from 1 on")
        return int(value)

    def parse_fraction(self) -> float:
        (value,) = self.parse_named_numbers("SHARE")
        if not 0 <= value <= 1:
            raise self.error(f"SHARE is {value:g} but must lie between 0 and 1")
        return value


def parse_partition(spec: str, bases: Mapping[str, str], shifts: Mapping[str, str]) -> tuple[Term, list[Term]]:
    """The base and the shifts; `bases` and `shifts` map the known names to an example of each."""
    first, *rest = (part.strip() for part in spec.split("+"))
    return _parse_term(spec, first, bases, "base"), [_parse_term(spec, part, shifts, "shift") for part in rest]


def _parse_term(spec: str, text: str, known: Mapping[str, str], kind: str) -> Term:
    name, _, argument = text.partition(":")
    if name not in known:
        raise UserError(f"partition {spec!r}: {name!r} is not a {kind}; write one of {', '.join(known.values())}")
    return Term(name, argument.strip(), known[name])
