"""The overview of the methods links all of them, and its table of shared options has the options that methods have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.methods import METHODS, default_options

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
OPTIONS = PAGE.partition("\n## Options\n")[2]
ROW = re.compile(r"^\| (`[a-z_]+\.[a-z_]+`[^|]*) \|", re.MULTILINE)
SHARED = [name for cell in ROW.findall(OPTIONS) for name in re.findall(r"`([^`]+)`", cell) if name != "train.schedule"]


def has_option(method: str, name: str) -> bool:
    piece, _, key = name.partition(".")
    return key in default_options(method).get(piece, {})


def test_every_method_is_in_the_overview_once():
    assert sorted(re.findall(r"^\| \[`([\w-]+)`\]\(methods/\1\.md\) \|", PAGE, re.MULTILINE)) == sorted(METHODS)


def test_every_page_of_a_method_names_a_paper_or_none():
    listed = set(re.findall(r"\]\(methods/([\w-]+)\.md\)", (DOCS / "papers.md").read_text(encoding="utf-8")))
    assert listed == set(METHODS)


@pytest.mark.parametrize("name", SHARED)
def test_shared_options_are_options_of_fedavg(name):
    assert has_option("fedavg", name)


def test_methods_with_select_probability_are_listed():
    sentence = next(line for line in OPTIONS.splitlines() if line.startswith("`select.probability` is an option of"))
    listed = set(re.findall(r"`([\w-]+)`", sentence))
    assert listed == {method for method in METHODS if has_option(method, "select.probability")}


def test_every_option_of_fedavg_is_in_the_table():
    shared = {*SHARED, "train.schedule"}
    assert not [f"{p}.{k}" for p, keys in default_options("fedavg").items() for k in keys if f"{p}.{k}" not in shared]
