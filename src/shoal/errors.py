"""What a user can put right: one sentence that names the field, the value and what would be right."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


class UserError(ValueError):
    """Bad input. The command line prints the sentence and exits with code 2."""


def imported(what: str, name: str) -> Callable[..., Any]:
    """The user's own class or function by `package.module:name`; the current folder counts as a place."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{what} {name!r} cannot be imported ({error}); give it as package.module:name") from error
    if not callable(found):
        raise UserError(f"{what} {name!r} is not a class or function but a {type(found).__name__}")
    return found
