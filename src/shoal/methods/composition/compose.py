"""A method composed of named pieces, one for each step: `cluster=aidc,select=repclust`, or the table [method] of a
recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import UserError, did_you_mean, look_up
from shoal.methods.composition.builder import DEFAULTS, STEPS, Draft, Piece
from shoal.methods.composition.setting import Setting
from shoal.methods.pieces import PIECES
from shoal.types import Method

ORDER = ("represent", "cluster", "train", "select", "aggregate", "personalise", "serve")
"""In which pieces are laid: who chooses may have to know on which rows is trained."""


def parse(text: str) -> dict[str, str]:
    """ "cluster=aidc,serve=average+prior" -> {"cluster": "aidc", "serve": "average+prior"}"""
    steps: dict[str, str] = {}
    for part in text.split(","):
        step, equals, name = (x.strip() for x in part.partition("="))
        if not equals:
            raise UserError(f"method {text!r}: {part!r} is not of the form step=piece, such as train=sgd")
        if step in steps:
            raise UserError(f"method {text!r} names {step} twice; each step has one piece")
        steps[step] = name
    return steps


def written(steps: Mapping[str, Any]) -> str:
    """As `parse` reads it, in the order of steps, without those that are as usual."""
    if not steps:
        raise UserError(f"method is an empty table; it must name a piece for one step at least: {', '.join(STEPS)}")
    for step, name in steps.items():
        if step not in STEPS:
            known = did_you_mean(step, STEPS) or f" (steps: {', '.join(STEPS)})"
            raise UserError(f"step {step!r} of a method is not known{known}")
        if not isinstance(name, str | list) or not name:
            raise UserError(
                f"{step} is {name!r}; it must be the name of a piece, such as {DEFAULTS[step]!r}; its options go under "
                f"[set.{step}]"
            )
        if isinstance(name, list) and len(name) > 1 and step != "serve":
            raise UserError(f"{step} is {name!r}; it must be one piece: only serve may have several")
    names = {k: "+".join(map(str, v)) if isinstance(v, list) else v for k, v in steps.items()}
    different = [f"{step}={names[step]}" for step in STEPS if names.get(step, DEFAULTS[step]) != DEFAULTS[step]]
    return ",".join(different) or f"train={DEFAULTS['train']}"


def compose(
    s: Setting, name: str, steps: Mapping[str, str], defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Method:
    """The method of these pieces; `defaults` are options as the method has them and a user may change them."""
    return draft(s, steps, defaults).method(name)


def draft(s: Setting, steps: Mapping[str, str], defaults: Mapping[str, Mapping[str, Any]] | None = None) -> Draft:
    s.defaults = defaults or {}
    d = Draft(s, DEFAULTS | dict(steps))
    chosen = pieces_of(d.chosen)
    refuse_misfits(d, chosen)
    for step in ORDER:
        for piece in chosen[step].values():
            piece.lay(d)
    return d


def pieces_of(steps: Mapping[str, str]) -> dict[str, dict[str, Piece]]:
    """step -> name -> piece; only the last step may have several."""
    written(steps)  # refuses steps that there are not
    found = {}
    for step in STEPS:
        names = steps[step].split("+") if step == "serve" else [steps[step]]
        if len(set(names)) < len(names) or ("plain" in names and len(names) > 1):
            raise UserError(f"serve is {steps[step]!r}; each piece must be there once, and plain alone")
        found[step] = {name: look_up(step, name, PIECES[step]) for name in names}
    return found


def refuse_misfits(d: Draft, chosen: Mapping[str, Mapping[str, Piece]]) -> None:
    for step, pieces in chosen.items():
        for name, piece in pieces.items():
            if piece.single and d.has("aggregate", "secure"):
                raise UserError(
                    f"aggregate=secure does not go with {step}={name}: that looks at single clients, and with secure "
                    "sums the server sees none; use aggregate=mean"
                )
            for other, allowed in piece.needs.items():
                if not d.has(other, *allowed):
                    right = " or ".join(f"{other}={x}" for x in allowed)
                    raise UserError(
                        f"{step}={name} does not go with {other}={d.chosen[other]}: {piece.why}; use {right}"
                    )


def of_pieces(text: str) -> Callable[[Setting], Method]:
    """What builds the method that `text` names."""
    steps = parse(text)
    name = written(steps)

    def make(s: Setting) -> Method:
        return compose(s, name, steps)

    return make
