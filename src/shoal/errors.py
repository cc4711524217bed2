"""Errors that a user can correct. Their message names the field, the value and what would be right."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")

MAX_SENTENCE = 4000  # characters of an error; the longest ones list the known names
_MAX_QUOTED_CHARACTERS = 300  # quoted from a file or from the error of a library


class UserError(ValueError):
    """An error in the user's input. The command line prints its message and exits with code 2.

    The message may quote what is wrong, which may come from anyone. It is therefore made a single line without control
    characters, which a terminal would obey, and is cut if it is very long.
    """

    def __init__(self, message: str) -> None:
        cut = message if len(message) <= MAX_SENTENCE else f"{message[: MAX_SENTENCE - 3]}..."
        super().__init__(escape_control_characters(cut)[:MAX_SENTENCE])


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


_MAX_TOML_BYTES, _MAX_TOML_DEPTH, _MAX_DOTS_IN_LINE = 2**20, 16, 200


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the content of a TOML text, which may come from anyone.

    Raises
    ------
    UserError
        If it is not TOML, or if reading or showing it would take very long: very large, very deep, or with a whole
        number beyond 64 bits.
    """
    if len(text) > _MAX_TOML_BYTES:
        raise UserError(f"it has {len(text)} characters, but may have at most {_MAX_TOML_BYTES}")
    if any(line.count(".") > _MAX_DOTS_IN_LINE for line in text.splitlines()):  # the parser is quadratic in them
        raise UserError(f"a line has more than {_MAX_DOTS_IN_LINE} dots")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(quote_reason(error)) from None
    _check_toml(content)
    return content


def _check_toml(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(_MAX_TOML_DEPTH):
        if any(isinstance(x, int) and not -(2**63) <= x < 2**63 for x in level):
            raise UserError("it has a whole number beyond 64 bits")
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [value for values in inner for value in values]
    if level:
        raise UserError(f"it is nested more than {_MAX_TOML_DEPTH} times")
