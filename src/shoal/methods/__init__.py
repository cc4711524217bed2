"""One file per method: a composition of stages. `METHODS` is the list that `shoal methods` prints."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from shoal.errors import UserError
from shoal.methods.centralised import centralised
from shoal.methods.fedavg import fedavg
from shoal.methods.fedavg_ft import fedavg_ft
from shoal.methods.fedprox import fedprox
from shoal.methods.local import local
from shoal.methods.setting import Setting
from shoal.types import Method

METHODS: dict[str, Callable[[Setting], Method]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavg-ft": fedavg_ft,
    "local": local,
    "centralised": centralised,
}


def build(name: str, setting: Setting) -> Method:
    """The method by name, with every option of `setting` taken by one of its pieces."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"method {name!r} is not known{hint} (known: {', '.join(METHODS)})")
    method = METHODS[name](setting)
    setting.refuse_unused(name)
    return method


def summary(name: str) -> str:
    """The first sentence of a method's module docstring."""
    import sys

    doc = sys.modules[METHODS[name].__module__].__doc__ or ""
    return doc.strip().split("\n\n")[0].replace("\n", " ")


__all__ = ["METHODS", "Setting", "build", "summary"]
