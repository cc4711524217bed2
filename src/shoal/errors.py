"""What a user can put right: one sentence that names the field, the value and what would be right."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Value = TypeVar("Found")


class UserError(ValueError):
    """Bad input. The command line prints the sentence and exits with code 2."""


class UnusedOption(UserError):
    """An option that a method does not take, or that changes nothing in it."""


def one_line_message(error: Exception) -> str:
    """Returns what is said of an error in one line."""
    if isinstance(error, OSError):
        file_text = f"{error.filename} " if error.filename else "a file "
        return f"{file_text}cannot be read or written: {error.strerror or error}"
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of a half-sentence that says what is not known; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def look_up(kind: str, name: str, table: Mapping[str, Value], own_format: str = "") -> Value:
    """By name. `own` says how users give one of their own."""
    if name not in table:
        known = ", ".join(table) + (f", or your own {own_format}" if own_format else "")
        raise UserError(f"{kind} {name!r} is not known{did_you_mean(name, table)} (known: {known})")
    return table[name]


def import_callable(kind: str, name: str) -> Callable[..., Any]:
    """The user's own class or function by `package.module:name`; the current folder counts as a place."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise UserError(f"{kind} {name!r} cannot be imported ({error}); give it as package.module:name") from error
    if not callable(found):
        raise UserError(f"{kind} {name!r} is not a class or function but a {type(found).__name__}")
    return found
