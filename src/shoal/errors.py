"""Errors that a user can correct. Their message names the field, the value and what would be right."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

_MAX_QUOTED_CHARACTERS = 300  # quoted from a file or from the error of a library


class UserError(ValueError):
    """An error in the user's input. The command line prints its message and exits with code 2."""


class UnusedOption(UserError):
    """An option that the method does not have, or that has no effect in it."""


def one_line_message(error: Exception) -> str:
    """Returns the message of an error in one line."""
    if isinstance(error, OSError):
        file_text = f"{error.filename} " if error.filename else "a file "
        return f"{file_text}cannot be read or written: {error.strerror or error}"
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


def escape_control_characters(text: str) -> str:
    """Returns text without control characters and line ends, which may come from a file into an error message."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(text: str) -> str:
    """Returns at most the first 300 characters of a text, followed by dots if it is longer."""
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}..."


def quote_reason(error: BaseException) -> str:
    """Returns what a library says of content that it refuses, as a part of an error of one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return escape_control_characters(shorten(str(error).rstrip(".") or type(error).__name__))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the candidate nearest to `name`, or an empty text."""
    nearest = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def look_up(kind: str, name: str, table: Mapping[str, Value], own_format: str = "") -> Value:
    """Returns the value with this name.

    Parameters
    ----------
    kind
        What the table contains, such as "model". It is the first word of the error message.
    name
        The name to look up.
    table
        The values by name.
    own_format
        The format in which users may name a value of their own. Empty if they cannot.

    Raises
    ------
    UserError
        If the table does not contain the name.
    """
    if name not in table:
        known_names = ", ".join(table) + (f", or your own {own_format}" if own_format else "")
        raise UserError(f"{kind} {name!r} is not known{did_you_mean(name, table)} (known: {known_names})")
    return table[name]


def import_callable(kind: str, name: str) -> Callable[..., Any]:
    """Imports a class or function that a user names as `package.module:name`, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{kind} {name!r} cannot be imported ({error}); give it as package.module:name") from error
    if not callable(imported):
        raise UserError(f"{kind} {name!r} is not a class or function but a {type(imported).__name__}")
    return imported
