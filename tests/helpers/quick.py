"""Options that make slow methods quick, for tests that do not measure how well a method learns."""

from __future__ import annotations

from shoal.methods import default_options

SHORT = {"gate": {"epochs": 1}, "personal": {"epochs": 1}, "personalise": {"epochs": 1}}


def quick_options(method: str) -> dict[str, dict[str, int]]:
    """Returns the options of `SHORT` that the method has."""
    defaults = default_options(method)
    return {group: keys for group, keys in SHORT.items() if keys.keys() <= defaults.get(group, {}).keys()}
