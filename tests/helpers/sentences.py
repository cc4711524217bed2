"""Checks the descriptions of settings and of command-line options."""

from __future__ import annotations

import re

FILLERS = """
a an the this that these those it its is are be of for to in on by with from as at and or
use set give value option setting here many
"""


def stems(text: str) -> list[str]:
    """Returns the words of a text in lower case, without the ending of a plural."""
    words = re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))
    return [re.sub(r"(?<=ch|sh|ss)es$|(?<=[^s]{2})s$", "", word) for word in words]


def complaint(name: str, text: str) -> str:
    """Returns what is wrong with the description, or an empty text."""
    words = stems(text)
    if not text:
        return "there is none"
    if len(words) < 5:
        return "it has fewer than five words"
    if not text.endswith("."):
        return "it has no full stop"
    if not text[0].isupper():
        return "it does not begin as a sentence"
    if not set(words) - set(stems(name)) - set(stems(FILLERS)):
        return "it says no more than the name"
    return ""
