"""Composes a method of pieces, one for each step: `cluster=CLUSTER,select=SELECT`, or a recipe's table [method].

Read `piece.py` for what a piece is, `fit.py` for which pieces fit together, and `builder.py` for what pieces add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import UserError, did_you_mean
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.fit import find_piece_classes, refuse_misfits
from shoal.methods.composition.piece import STEPS, default_piece_names
from shoal.methods.composition.setting import Setting
from shoal.types import Method

ADDING_ORDER = ("represent", "cluster", "train", "personalise", "select", "aggregate", "serve")
"""The order in which pieces are added: training must be known before clients are selected and models aggregated."""


def parse_composition(text: str) -> dict[str, str]:
    """Returns the piece of every step, such as `{"cluster": "aidc"}` for "cluster=aidc"."""
    steps: dict[str, str] = {}
    for part in text.split(","):
        step, equals, name = (x.strip() for x in part.partition("="))
        if not equals:
            raise UserError(f"method {text!r}: {part!r} is not of the form step=piece, such as train=sgd")
        if step in steps:
            raise UserError(f"method {text!r} names {step} twice; each step has one piece")
        steps[step] = name
    return steps


def canonical_name(steps: Mapping[str, Any]) -> str:
    """Returns the composition as `parse_composition` reads it, in the order of steps and without default pieces."""
    if not steps:
        raise UserError(f"method is an empty table; it must name a piece for one step at least: {', '.join(STEPS)}")
    defaults = default_piece_names()
    for step, name in steps.items():
        if step not in STEPS:
            suggestion = did_you_mean(step, STEPS) or f" (steps: {', '.join(STEPS)})"
            raise UserError(f"step {step!r} of a method is not known{suggestion}")
        if not isinstance(name, str | list | type) or not name:
            raise UserError(
                f"{step} is {name!r}; it must be the name of a piece, such as {defaults[step]!r}; its options go under "
                f"[set.{step}]"
            )
        if isinstance(name, list) and len(name) > 1 and step != "serve":
            raise UserError(f"{step} is {name!r}; it must be one piece: only serve may have several")
    names = {
        k: "+".join(_canonical_piece_name(k, x) for x in (v if isinstance(v, list) else [v])) for k, v in steps.items()
    }
    different = [f"{step}={names[step]}" for step in STEPS if names.get(step, defaults[step]) != defaults[step]]
    return ",".join(different) or f"train={defaults['train']}"


def _canonical_piece_name(step: str, piece: Any) -> str:
    """Returns the name of a piece; a class is written as `package.module:Class`."""
    if not isinstance(piece, type):
        return str(piece)
    if "." in piece.__qualname__:
        raise UserError(f"{step} is the class {piece.__qualname__}; it must be at the top level of a module")
    return f"{piece.__module__}:{piece.__qualname__}"


def compose(
    setting: Setting, name: str, steps: Mapping[str, str], defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Method:
    """Builds the method of these pieces.

    Parameters
    ----------
    setting : Setting
        The model, the numbers of the job and the user's options.
    name : str
        The name of the method.
    steps : mapping
        The piece of each step. Steps that are not named have their default piece.
    defaults : mapping, optional
        Default values of options for this method, by group and key.

    Returns
    -------
    Method

    Raises
    ------
    UserError
        If a step or piece is not known, or if the pieces do not fit together.
    """
    setting.defaults = defaults or {}
    builder = start_builder(setting, steps)
    for step in ADDING_ORDER:
        for piece in builder.pieces[step]:
            setting.make(piece.group or step, piece).add_to(builder)
    return builder.build(name)


def start_builder(setting: Setting, steps: Mapping[str, str]) -> MethodBuilder:
    """Returns a builder with the pieces of all steps, after checking that they fit together."""
    canonical_name(steps)  # refuses unknown steps
    steps = default_piece_names() | dict(steps)
    refuse_several_pieces(steps)
    pieces_by_step = find_piece_classes(steps)
    refuse_misfits(pieces_by_step)
    return MethodBuilder(setting, pieces_by_step)


def refuse_several_pieces(steps: Mapping[str, str]) -> None:
    """Raises `UserError` if a step has several pieces where it may have only one, or the same piece twice."""
    for step, text in steps.items():
        names = text.split("+")
        if len(names) > 1 and step != "serve":
            raise UserError(f"{step} is {text!r}; it must be one piece: only serve may have several")
        if len(set(names)) < len(names) or (default_piece_names()[step] in names and len(names) > 1):
            raise UserError(
                f"{step} is {text!r}; each piece must be there once, and {default_piece_names()[step]} alone"
            )


def factory_from_pieces(text: str) -> Callable[[Setting], Method]:
    """Returns the function that builds the method of this composition."""
    steps = parse_composition(text)
    name = canonical_name(steps)

    def make(setting: Setting) -> Method:
        return compose(setting, name, steps)

    return make
