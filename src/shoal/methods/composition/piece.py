"""Defines a piece: a named choice for one of the seven steps of a method, in one class.

Read `methods/pieces/` for examples, `builder.py` for what a piece can add to a method, and docs/own-piece.md for pieces
of users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from shoal.errors import UserError, import_callable, look_up
from shoal.methods.composition.capability import Capability
from shoal.types import HasOptions

if TYPE_CHECKING:
    from shoal.methods.composition.builder import MethodBuilder

STEPS = ("represent", "cluster", "select", "train", "aggregate", "personalise", "serve")
ENTRY_POINT_GROUP = "shoal.pieces"
CAPABILITY_FIELDS = ("requires", "provides", "uses", "must_be_used")  # the class variables with capabilities

_registry: dict[str, dict[str, type[Piece]]] = {step: {} for step in STEPS}


@dataclass(frozen=True)
class Piece(HasOptions):
    """A choice for one step of a method.

    A subclass is a frozen dataclass. Its fields that are declared with `option` are set by `--set`, its class variables
    state what it requires and what leaves the clients, and `add_to` adds it to a method.
    """

    step: ClassVar[str] = ""  # set by `register` or an entry point; any other class sets it itself
    name: ClassVar[str] = ""  # the name for users: set by `register` or an entry point, else package.module:Class
    group: ClassVar[str] = ""  # the first part of its options' names; by default the step
    is_default: ClassVar[bool] = False  # True if a method without a piece for this step has this one
    source: ClassVar[str] = ""  # author and year, and where in the paper

    requires: ClassVar[tuple[Capability, ...]] = ()  # other pieces must provide these
    provides: ClassVar[tuple[Capability, ...]] = ()
    uses: ClassVar[tuple[Capability, ...]] = ()  # used if another piece provides them, but not required
    must_be_used: ClassVar[tuple[Capability, ...]] = ()  # another piece must require or use one of these
    requires_reason: ClassVar[str] = ""  # why it requires them, for error messages

    client_sends: ClassVar[str] = "nothing"
    client_keeps: ClassVar[str] = "nothing"
    server_learns: ClassVar[str] = "nothing"  # about individual clients
    remark: ClassVar[str] = ""  # another fact for users

    def add_to(self, method: MethodBuilder) -> None:
        """Adds stages, models and predictions to the method. The default adds nothing."""

    @classmethod
    def facts(cls) -> dict[str, Any]:
        """Returns the description of the piece that `shoal pieces` prints."""
        texts = ("source", "client_sends", "client_keeps", "server_learns", "remark")
        facts: dict[str, Any] = {"summary": summary(cls)} | {key: getattr(cls, key) for key in texts}
        return facts | {key: [capability.name for capability in getattr(cls, key)] for key in CAPABILITY_FIELDS}


PieceClass = TypeVar("PieceClass", bound=type[Piece])


def summary(piece: type[Piece]) -> str:
    """Returns the first paragraph of the class docstring, in one line."""
    return " ".join((piece.__doc__ or "").strip().split("\n\n")[0].split())


def register(step: str, name: str) -> Callable[[PieceClass], PieceClass]:
    """Makes a piece available by name.

    Parameters
    ----------
    step : str
        The step of the piece, one of `STEPS`.
    name : str
        The name by which users choose it.

    Returns
    -------
    callable
        A class decorator: `@register("cluster", "mine")`.

    Raises
    ------
    UserError
        If another class has this name, or if the class is not a valid piece.
    """

    def add(piece: PieceClass) -> PieceClass:
        other = _registry.get(step, {}).get(name)
        # The same path is no conflict: a cell of a notebook may define the class again.
        if other is not None and _import_path(other) != _import_path(piece):
            raise UserError(
                f"piece {step}={name} is both {_import_path(other)} and {_import_path(piece)}; rename one of them"
            )
        _set_step_and_name(piece, step, name)
        _registry[step][name] = piece
        return piece

    return add


def _set_step_and_name(piece: type[Piece], step: str, name: str) -> None:
    """Checks a piece class and sets its step and its name. A subclass inherits neither name nor `is_default`."""
    if step not in STEPS:
        raise UserError(f"piece {name!r} is for the step {step!r}; it must be one of {', '.join(STEPS)}")
    if piece.step not in ("", step):
        raise UserError(f"{step} is {name!r}, but that piece is for the step {piece.step!r}")
    for problem in _mistakes(piece):
        raise UserError(f"piece {step}={name}: {problem}")
    piece.step, piece.name, piece.group = step, name, piece.group or step
    piece.is_default = vars(piece).get("is_default", False)


def _mistakes(piece: type[Piece]) -> Iterator[str]:
    """Yields the mistakes in the class definition, each as the end of an error message."""
    reserved = {name for base in (Piece, HasOptions) for name in base.__annotations__}
    for key in (key for key, value in vars(piece).items() if isinstance(value, Field)):
        yield f"{key} is an option, but the class is no dataclass; put @dataclass(frozen=True) above it"
    for f in fields(piece):
        if f.name in reserved:  # it would hide a class variable of the piece, such as `requires`
            yield f"option {f.name!r} has a reserved name; choose another one"
        if f.default is MISSING and f.default_factory is MISSING:
            yield f"field {f.name!r} has no default; give it one, such as option(2, 'What it sets.')"
    for key in CAPABILITY_FIELDS:
        value = getattr(piece, key)
        if not isinstance(value, tuple) or not all(isinstance(part, Capability) for part in value):
            yield f"{key} is {value!r}; it must be a tuple of capabilities, such as (CLUSTER_MODELS,)"


def _import_path(piece: type[Piece]) -> str:
    return f"{piece.__module__}:{piece.__qualname__}"


@cache
def _load_pieces() -> None:
    """Imports all pieces of this package and those that installed packages declare as entry points `STEP.NAME`."""
    package = import_module("shoal.methods.pieces")
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        step, _, name = entry.name.partition(".")
        try:
            register(step, name)(_require_piece_class(entry.name, import_callable("class", entry.value)))
        except UserError as error:
            owner = entry.dist.name if entry.dist else "unknown"
            raise UserError(f"entry point {entry.name!r} of the installed package {owner!r}: {error}") from None


def pieces() -> Mapping[str, Mapping[str, type[Piece]]]:
    """Returns all pieces by step and name. The default of a step comes first, the others are in the order of names."""
    _load_pieces()
    return {
        step: dict(sorted(classes.items(), key=lambda item: (not item[1].is_default, item[0])))
        for step, classes in _registry.items()
    }


def piece_class(step: str, name: str) -> type[Piece]:
    """Returns the class of a piece by its name, or of a user's piece by `package.module:Class`."""
    if ":" not in name:
        return look_up(step, name, pieces()[step], own_format="package.module:class")
    piece = _require_piece_class(name, import_callable(step, name))
    if not piece.step:
        raise UserError(f"piece {name!r} does not say for which step it is; write step = {step!r} in its class")
    if piece not in pieces()[piece.step].values():
        _set_step_and_name(piece, piece.step, name)
    if piece.step != step:
        raise UserError(f"{step} is {name!r}, but that piece is for the step {piece.step!r}")
    return piece


def _require_piece_class(name: str, value: Any) -> type[Piece]:
    if not (isinstance(value, type) and issubclass(value, Piece)):
        raise UserError(f"piece {name!r} is {value!r}; it must be a subclass of shoal.methods.composition.Piece")
    return value


def default_piece_names() -> dict[str, str]:
    """Returns the default piece of every step."""
    return {step: next(n for n, piece in classes.items() if piece.is_default) for step, classes in pieces().items()}
