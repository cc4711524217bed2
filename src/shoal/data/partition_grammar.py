"""The text form of a partition: one base and any number of shifts, such as `dirichlet:0.3+rotate:0,90`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import UserError


@dataclass(frozen=True)
class Term:
    """A part of a partition, written `name` or `name:argument`."""

    name: str
    argument: str
    example: str

    def error(self, reason: str) -> UserError:
        """Returns an error that names this term and a correct example."""
        text = f"{self.name}:{self.argument}" if self.argument else self.name
        return UserError(f"partition {text!r}: {reason}, as in {self.example}.")

    def refuse_argument(self) -> None:
        """Raises a UserError if the term has an argument."""
        if self.argument:
            raise self.error("it takes no argument")

    def parse_numbers(self) -> list[float]:
        """Returns the argument as finite numbers."""
        try:
            values = [float(part) for part in self.argument.split(",")]
        except ValueError as error:
            raise self.error("the text after the colon must be numbers with commas between them") from error
        if not all(math.isfinite(value) for value in values):
            raise self.error("numbers must be finite")
        return values

    def parse_named_numbers(self, *names: str) -> list[float]:
        """Returns the argument as numbers, one for each of these names."""
        need = f"it needs {len(names)} number(s), {', '.join(names)}"
        if not self.argument:
            raise self.error(need)
        values = self.parse_numbers()
        if len(values) != len(names):
            raise self.error(f"{need}, but has {len(values)}")
        return values

    def require_positive(self, name: str, value: float) -> float:
        """Returns the value, or raises a UserError if it is not above 0."""
        if value <= 0:
            raise self.error(f"{name} is {value:g}, but it must be above 0")
        return value

    def require_whole_number(self, name: str, value: float) -> int:
        """Returns the value as an integer, or raises a UserError if it is not a whole number of 1 or more."""
        if value != int(value) or value < 1:
            raise self.error(f"{name} is {value:g}, but it must be a whole number of 1 or more")
        return int(value)

    def parse_fraction(self) -> float:
        """Returns the argument as a number between 0 and 1."""
        (value,) = self.parse_named_numbers("FRACTION")
        if not 0 <= value <= 1:
            raise self.error(f"FRACTION is {value:g}, but it must be between 0 and 1")
        return value


def parse_partition(spec: str, bases: Mapping[str, str], shifts: Mapping[str, str]) -> tuple[Term, list[Term]]:
    """Returns the base and the shifts of a partition.

    Parameters
    ----------
    spec : str
        The text of the partition.
    bases, shifts : Mapping[str, str]
        An example of each base and of each shift, by name.

    Returns
    -------
    tuple[Term, list[Term]]
        The base, and the shifts in the order in which they are applied.

    Raises
    ------
    UserError
        If a name is unknown.
    """
    first, *others = (part.strip() for part in spec.split("+"))
    return _parse_term(spec, first, bases, "base"), [_parse_term(spec, part, shifts, "shift") for part in others]


def _parse_term(spec: str, text: str, examples: Mapping[str, str], kind: str) -> Term:
    name, _, argument = text.partition(":")
    if name not in examples:
        raise UserError(f"partition {spec!r}: {name!r} is not a {kind}; write one of {', '.join(examples.values())}.")
    return Term(name, argument.strip(), examples[name])
