"""Every method has a page of its own, whose generated blocks are current."""

import re
from pathlib import Path

import pytest

from shoal.experiment.method_pages import BLOCK, BLOCKS, page_text
from shoal.methods import METHODS

FOLDER = Path(__file__).parents[2] / "docs/methods"


def test_every_method_has_a_page_and_every_page_a_method():
    assert {path.stem for path in FOLDER.glob("*.md")} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_generated_blocks_of_a_page_are_current(name):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert {match[2] for match in BLOCK.finditer(text)} == set(BLOCKS)
    assert page_text(name, text) == text, "run `make docs`"


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_the_same_parts_as_the_others(name):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    source = "preceding study" if name == "shoal" else "paper"
    assert headings == ["How it works", "What leaves the client", "Options", f"Deviations from the {source}", "Results"]
    assert text.startswith("# ") and "**Use it when**" in text and "**Paper:**" in text and "**Our result:**" in text
