"""What a method is built from: the model, the common numbers, and options by name.

A method makes its pieces with `setting.make("train", LocalTraining, ...)`. A field that is declared with
`shoal.types.option` can be set by the user under that name (`--set train.mu=0.1`), which replaces the
method's default. What no piece takes is refused with the list of what could have been meant, and what has no effect
in the method is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.errors import UnusedOption, UserError, did_you_mean
from shoal.models import Model
from shoal.stages.edges import Topology, parse_edges
from shoal.types import ClientId, Examples, Option

Piece = TypeVar("Piece")
_TYPES = {int: "whole number", float: "number", bool: "true, false", str: "text"}
OF_STEPS = ("batch_size", "lr", "momentum", "weight_decay", "clip", "mu")  # options of a program that takes steps
NUMBERS_ARE_NAMES = ConfigDict(coerce_numbers_to_str=True)  # a layer may be called 1


class AvailableOption(NamedTuple):
    """An option that a method takes."""

    default: Any
    declared: Option
    hint: Any  # the type of its values
    only_if: str = ""  # when it has an effect, in words; empty: always

    @property
    def accepted(self) -> str:
        """Returns the accepted values in words, such as "whole number, 0 or more" or "size, uniform"."""
        if typing.get_origin(self.hint) is typing.Literal:
            return ", ".join(map(str, typing.get_args(self.hint)))
        return ", ".join(part for part in (_TYPES[self.hint], self.declared.range_text) if part)

    @property
    def meaning(self) -> str:
        return self.declared.help + (f" It has an effect only if {self.only_if}." if self.only_if else "")


@dataclass
class Setting:
    model: Model
    rounds: int
    cohort: int
    epochs: int = 2
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    eval_every: int = 1
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # piece -> key -> value
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # piece -> key -> value, of the method
    known: dict[str, dict[str, AvailableOption]] = field(default_factory=dict)  # piece -> key -> what methods take
    idle: dict[tuple[str, str], str] = field(default_factory=dict)  # piece and key without effect -> unless what
    public: Examples | None = None  # rows that no client holds
    public_wanted: int = 0  # of them, as methods ask
    edges: Topology | None = None  # who is under which edge; None: clients and one server
    groups: Mapping[str, int] | None = None  # that were planted, of each client: for upper bounds, in simulations only
    cloud_every: int | None = None  # rounds between two meetings of edges; None: as usual

    def make(self, name: str, piece: type[Piece], fixed: tuple[str, ...] = (), /, **defaults: Any) -> Piece:
        """`piece(**defaults)`, with the options for `name` on top that are usual for the method, and then the user's,
        but for those that the method has `fixed`."""
        wanted, usual = self.options.get(name, {}), self.defaults.get(name, {})
        hints = _hints(piece)  # type: ignore[arg-type]  # mypy takes a class of a TypeVar for unhashable
        values, known = dict(defaults), dict[str, AvailableOption]()
        for f in dataclasses.fields(piece):  # type: ignore[arg-type]
            declared: Option | None = f.metadata.get("option")
            if declared is None or f.name in fixed:
                continue
            if f.name in usual:
                values[f.name] = usual[f.name]
            words = declared.only_if.description.format(group=name) if declared.only_if else ""
            known[f.name] = AvailableOption(values.get(f.name, f.default), declared, hints[f.name], words)
            if f.name in wanted:
                values[f.name] = _typed(f"{name}.{f.name}", hints[f.name], wanted[f.name], declared)
        if known:
            self.known.setdefault(name, {}).update(known)
        made = piece(**values)
        for key, o in known.items():
            self.idle.pop((name, key), None)
            if o.declared.only_if and not o.declared.only_if.is_met(made):
                self.without_effect(name, key, unless=o.only_if)
        return made

    def without_effect(self, name: str, *keys: str, unless: str) -> None:
        """Options that change nothing in this method, unless something is different. Only for conditions that an option
        cannot declare, because they are about other objects than its own."""
        self.idle |= dict.fromkeys(((name, key) for key in keys), unless)

    def training(self, name: str, piece: type[Piece], fixed: tuple[str, ...] = (), /, **defaults: Any) -> Piece:
        """`make` for a program that trains, with the setting's common numbers."""
        common = {
            "model": self.model,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "momentum": self.momentum,
        }
        program = self.make(name, piece, fixed, **common | defaults)
        if name != "train" and not getattr(program, "epochs", 1):  # numbers of `train` are used by other programs too
            self.without_effect(name, *OF_STEPS, unless=f"{name}.epochs is above 0")
        return program

    def want_public(self, rows: int) -> Examples | None:
        """The rows that no client holds, and that the method would have as many. None where there are none: the user
        may have asked for none, and a method is also built before there are any data."""
        self.public_wanted = max(self.public_wanted, rows)
        return self.public

    def want_edges(self, topology: Topology) -> None:
        """The method is one of edges: these, where the user did not say which."""
        self.edges = self.edges or dataclasses.replace(
            topology, cloud_every_rounds=self.cloud_every or topology.cloud_every_rounds
        )

    def refuse_unused(self, method: str, make: Callable[[Setting], Any]) -> None:
        """Every option of the user must be one of the method's, and have an effect unless it has its default. `make`
        is what builds the method."""
        for name, key, value in self._given():
            path, available, unless = f"{name}.{key}", self.known.get(name, {}).get(key), self.idle.get((name, key))
            if unless and not (available and _typed(path, available.hint, value, None) == available.default):
                raise UnusedOption(
                    f"option {path} is {value!r}, but it has no effect unless {unless}; change that or leave {path} out"
                )
            if available is None:
                self._refuse_excluded(name, key, value, make)
                every = [f"{piece}.{k}" for piece, known in self.known.items() for k in known]
                near = did_you_mean(path, every)
                raise UnusedOption(
                    f"option {path} is not known to method {method}{near} (it takes {self._choices(name)})"
                )

    def _refuse_excluded(self, name: str, key: str, value: Any, make: Callable[[Setting], Any]) -> None:
        """Names the option without which the method would take this one, such as one that leaves a component out."""
        for other, its_key, its_value in self._given():
            fewer = {
                n: {k: v for k, v in keys.items() if (n, k) != (other, its_key)} for n, keys in self.options.items()
            }
            trial = dataclasses.replace(self, options=fewer, known={}, idle={})
            with suppress(UserError):
                make(trial)
            if key in fewer.get(name, {}) and key in trial.known.get(name, {}):
                excluding = f"{other}.{its_key}={_as_typed(its_value)}"
                raise UnusedOption(
                    f"option {name}.{key} is {value!r}, but it has no effect with {excluding}; change that or leave "
                    f"{name}.{key} out"
                )

    def _given(self) -> list[tuple[str, str, Any]]:
        return [(name, key, value) for name, keys in self.options.items() for key, value in keys.items()]

    def _choices(self, name: str) -> str:
        groups = {name: self.known[name]} if name in self.known else self.known
        return ", ".join(f"{group}.{key}" for group, keys in groups.items() for key in keys)


@cache  # without it, this is most of the time that it takes to build a method
def _hints(piece: Any) -> dict[str, Any]:
    return typing.get_type_hints(piece)


def _as_typed(value: Any) -> str:
    """As a user writes it behind `--set OPTION=`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(path: str, hint: Any, value: Any, declared: Option | None) -> Any:
    try:
        typed = TypeAdapter(hint, config=NUMBERS_ARE_NAMES if hint is str else None).validate_python(value)
        if isinstance(typed, float) and not math.isfinite(typed):
            raise UserError(f"option {path} is {value!r}: input should be a finite number")
        if declared is not None and not declared.accepts(typed):
            raise UserError(f"option {path} is {value!r}; it must be {declared.range_text}")
        return typed
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise UserError(f"option {path} is {value!r}: {what[0].lower()}{what[1:]}") from error


class TrainingJob(Protocol):
    """What a method is built from, of everything that a job says."""

    rounds: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    eval_every: int
    set: dict[str, dict[str, Any]]
    edges: str | None
    edge_column: str | None
    cloud_every: int | None


def topology(job: TrainingJob, places: Mapping[ClientId, str] | None = None) -> Topology | None:
    """The edges that the job asks for; a method may want some where it asks for none."""
    asked, places = "place" if job.edge_column is not None else job.edges, places or {}
    if asked is None:
        return None
    return Topology(
        *parse_edges(asked, places),
        cloud_every_rounds=job.cloud_every or Topology.cloud_every_rounds,
        column_values=places,
    )


def setting_of(
    job: TrainingJob,
    model: Model,
    cohort: int,
    public: Examples | None = None,
    places: Mapping[ClientId, str] | None = None,
) -> Setting:
    return Setting(
        model=model,
        rounds=job.rounds,
        cohort=cohort,
        epochs=job.epochs,
        batch_size=job.batch_size,
        lr=job.lr,
        momentum=job.momentum,
        eval_every=job.eval_every,
        options=job.set,
        public=public,
        edges=topology(job, places),
        cloud_every=job.cloud_every,
    )
