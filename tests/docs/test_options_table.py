"""The table of options has what `shoal methods` says."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.methods import default_options

PAGE = (Path(__file__).parents[2] / "docs/methods.md").read_text()
ROW = re.compile(r"^\| (`[a-z_]+\.[a-z_0-9]+`[^|]*) \| ([^|]*) \| (.*) \|$", re.MULTILINE)


def told(first: str) -> list[str]:
    """`probe.at`, `.every` -> probe.at, probe.every"""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", first):
        names.append(names[-1].partition(".")[0] + name if name.startswith(".") else name)
    return names


def test_every_option_of_fce_is_in_the_table():
    rows = ROW.findall(PAGE.partition("\n## Options\n")[2])
    known = {
        name for first, _, meaning in rows if "`fce`" in meaning or first.startswith("`train.") for name in told(first)
    }
    assert not [f"{p}.{k}" for p, keys in default_options("fce").items() for k in keys if f"{p}.{k}" not in known]
