"""A piece: a named choice for one of the seven steps of a method, in one class. Read `methods/pieces/` for examples."""

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
CAPABILITY_FIELDS = ("needs", "provides", "uses", "must_be_used")  # what a piece says in capabilities

_registry: dict[str, dict[str, type[Piece]]] = {step: {} for step in STEPS}


@dataclass(frozen=True)
class Piece(HasOptions):
    """A choice for one step. A subclass is a frozen dataclass: its fields made with `option` are what `--set` changes,
    its class variables say what it needs and what leaves the clients, and `add_to` adds it to a method."""

    step: ClassVar[str] = ""  # which one: `register` and an entry point set it, any other class says it itself
    name: ClassVar[str] = ""  # by which users name it: set by `register` or an entry point, else package.module:Class
    group: ClassVar[str] = ""  # the first part of its options' names; the step, where a piece says nothing else
    is_default: ClassVar[bool] = False  # whether it stands at its step where a method names no piece
    source: ClassVar[str] = ""  # author and year, and where in the paper

    requires: ClassVar[tuple[Capability, ...]] = ()  # other pieces must provide these
    provides: ClassVar[tuple[Capability, ...]] = ()
    uses: ClassVar[tuple[Capability, ...]] = ()  # where they are provided
    must_be_used: ClassVar[tuple[Capability, ...]] = ()  # of these another piece must need or use one
    requires_reason: ClassVar[str] = ""  # why it needs what it needs, as a sentence

    client_sends: ClassVar[str] = "nothing"
    client_keeps: ClassVar[str] = "nothing"
    server_learns: ClassVar[str] = "nothing"  # of individual clients
    remark: ClassVar[str] = ""  # what else a user should know

    def add_to(self, method: MethodBuilder) -> None:
        """Adds stages, models and predictions to the method. The default adds nothing."""

    @classmethod
    def facts(cls) -> dict[str, Any]:
        """What is known of the piece without building a method."""
        texts = ("source", "client_sends", "client_keeps", "server_learns", "remark")
        facts: dict[str, Any] = {"summary": summary(cls)} | {key: getattr(cls, key) for key in texts}
        return facts | {key: [capability.name for capability in getattr(cls, key)] for key in CAPABILITY_FIELDS}


PieceClass = TypeVar("PieceClass", bound=type[Piece])


def summary(piece: type[Piece]) -> str:
    """The first paragraph of the class docstring, in one line."""
    return " ".join((piece.__doc__ or "").strip().split("\n\n")[0].split())


def register(step: str, name: str) -> Callable[[PieceClass], PieceClass]:
    """Makes a piece available by name: `@register("cluster", "mine")` above its class."""

    def add(piece: PieceClass) -> PieceClass:
        other = _registry.get(step, {}).get(name)
        if other is not None and _import_path(other) != _import_path(
            piece
        ):  # the same path: a cell of a notebook that ran again
            raise UserError(
                f"piece {step}={name} is both {_import_path(other)} and {_import_path(piece)}; rename one of them"
            )
        _set_step_and_name(piece, step, name)
        _registry[step][name] = piece
        return piece

    return add


def _set_step_and_name(piece: type[Piece], step: str, name: str) -> None:
    """Gives a class its step and its name, if it is made as a piece must be. A name and a default are not inherited."""
    if step not in STEPS:
        raise UserError(f"piece {name!r} is for the step {step!r}; it must be one of {', '.join(STEPS)}")
    if piece.step not in ("", step):
        raise UserError(f"{step} is {name!r}, but that piece is for the step {piece.step!r}")
    for problem in _mistakes(piece):
        raise UserError(f"piece {step}={name}: {problem}")
    piece.step, piece.name, piece.group = step, name, piece.group or step
    piece.is_default = vars(piece).get("default", False)


def _mistakes(piece: type[Piece]) -> Iterator[str]:
    """What an author can have got wrong in the class, as the end of a sentence."""
    reserved = {name for base in (Piece, HasOptions) for name in base.__annotations__}
    for key in (key for key, value in vars(piece).items() if isinstance(value, Field)):
        yield f"{key} is an option, but the class is no dataclass; put @dataclass(frozen=True) above it"
    for f in fields(piece):
        if f.name in reserved:  # it would hide what the class says about the piece, such as `needs`
            yield f"option {f.name!r} has a reserved name; choose another one"
        if f.default is MISSING and f.default_factory is MISSING:
            yield f"field {f.name!r} has no default; give it one, such as option(2, 'What it is for.')"
    for key in CAPABILITY_FIELDS:
        value = getattr(piece, key)
        if not isinstance(value, tuple) or not all(isinstance(part, Capability) for part in value):
            yield f"{key} is {value!r}; it must be a tuple of capabilities, such as (CLUSTER_MODELS,)"


def _import_path(piece: type[Piece]) -> str:
    return f"{piece.__module__}:{piece.__qualname__}"


@cache
def _load_pieces() -> None:
    """Imports every piece of this package, and those that installed packages offer as entry points `STEP.NAME`."""
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
    """Every known piece: step -> name -> class; the default of a step comes first, the others in the order of names."""
    _load_pieces()
    return {
        step: dict(sorted(found.items(), key=lambda item: (not item[1].is_default, item[0])))
        for step, found in _registry.items()
    }


def piece_class(step: str, name: str) -> type[Piece]:
    """A piece by its name, or one of the user's own by `package.module:class`."""
    if ":" not in name:
        return look_up(step, name, pieces()[step], own_format="package.module:class")
    found = _require_piece_class(name, import_callable(step, name))
    if not found.step:
        raise UserError(f"piece {name!r} does not say for which step it is; write step = {step!r} in its class")
    if found not in pieces()[found.step].values():
        _set_step_and_name(found, found.step, name)
    if found.step != step:
        raise UserError(f"{step} is {name!r}, but that piece is for the step {found.step!r}")
    return found


def _require_piece_class(name: str, value: Any) -> type[Piece]:
    if not (isinstance(value, type) and issubclass(value, Piece)):
        raise UserError(f"piece {name!r} is {value!r}; it must be a subclass of shoal.methods.composition.Piece")
    return value


def default_piece_names() -> dict[str, str]:
    """The piece of every step that a method has where it names none."""
    return {step: next(name for name, piece in found.items() if piece.is_default) for step, found in pieces().items()}
