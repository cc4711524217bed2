"""The glossary follows from the vocabulary, and pages are linked to it where a term is used first."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import glossary
import pytest
from glossary import Term, linked, prose, read_vocabulary

ROOT = Path(__file__).parents[3]
COHORT = Term("cohort", "The clients of a round.", link_words=("cohort", "cohorts"))
UNSEEN = Term("unseen client", "A client outside of training.", link_words=("unseen client", "unseen clients"))
CLIENT = Term("client", "A device with data.", link_words=("client", "clients"))

VOCABULARY = """
unlinked_pages = ["docs/errors.md"]

[[term]]
term = "cohort"
definition = "The clients of a round."
avoid = ["chosen ones"]

[[term]]
term = "client"
definition = "A device with data. A round has a cohort of them."
link_words = ["client", "clients"]

[[style]]
use = "again"
avoid = ["anew"]
"""


@pytest.fixture
def root(tmp_path):
    """A project with a vocabulary and no pages."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/vocabulary.toml").write_text(VOCABULARY)
    return tmp_path


class TestVocabulary:
    def test_it_is_read(self, root):
        vocabulary = read_vocabulary(root / "docs/vocabulary.toml")
        assert [term.term for term in vocabulary.terms] == ["cohort", "client"]
        assert vocabulary.avoided() == {"chosen ones": "cohort", "anew": "again"}

    def test_a_term_may_say_what_to_write_instead(self, root):
        (root / "docs/vocabulary.toml").write_text(VOCABULARY.replace("avoid = [", 'use = "select"\navoid = [', 1))
        assert read_vocabulary(root / "docs/vocabulary.toml").avoided()["chosen ones"] == "select"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('\n[[term]]\nterm = "round"\ndefinition = "A step."\nlinkwords = []', "unknown key linkwords"),
            ('\n[[words]]\nuse = "x"', "unknown key words"),
            ('\n[[term]]\nterm = "cohort"\ndefinition = "Twice."\nlink_words = []', "'cohort' is in two places"),
            ('\n[[style]]\nuse = "once more"\navoid = ["Anew"]', "'anew' is in two places"),
        ],
    )
    def test_mistakes_are_refused(self, root, line, message):
        (root / "docs/vocabulary.toml").write_text(VOCABULARY + line)
        with pytest.raises(ValueError, match=message):
            read_vocabulary(root / "docs/vocabulary.toml")


class TestPage:
    def test_terms_are_sorted_and_link_to_each_other(self, root):
        assert glossary.main([], root) == 0
        page = (root / "docs/glossary.md").read_text()
        assert page.endswith(
            "\n## client\n\nA device with data. A round has a [cohort](#cohort) of them.\n"
            "\n## cohort\n\nThe [clients](#client) of a round.\n"
        )

    def test_the_check_fails_until_the_page_is_written(self, root, capsys):
        assert glossary.main(["--check"], root) == 1
        assert "make docs" in capsys.readouterr().err
        assert not (root / "docs/glossary.md").exists()
        glossary.main([], root)
        assert glossary.main(["--check"], root) == 0
        (root / "docs/vocabulary.toml").write_text(VOCABULARY.replace("A device", "A phone"))
        assert glossary.main(["--check"], root) == 1

    def test_the_page_of_the_project_is_current(self):
        assert glossary.main(["--check"]) == 0

    def test_an_anchor_is_that_of_the_heading(self):
        assert Term("edge-cloud link (slow)", "").anchor == "edge-cloud-link-slow"


class TestLinks:
    def test_only_the_first_use_is_linked(self):
        assert linked("A cohort. The cohort.", [COHORT]) == "A [cohort](glossary.md#cohort). The cohort."

    def test_a_plural_and_a_capital_are_uses(self):
        assert linked("Cohorts vary. A cohort.", [COHORT]) == "[Cohorts](glossary.md#cohort) vary. A cohort."

    def test_the_longest_term_is_linked(self):
        assert linked("Unseen clients and clients.", [CLIENT, UNSEEN]) == (
            "[Unseen clients](glossary.md#unseen-client) and [clients](glossary.md#client)."
        )

    def test_a_term_may_continue_on_the_next_line(self):
        assert linked("These are unseen\nclients.", [UNSEEN]) == (
            "These are [unseen\nclients](glossary.md#unseen-client)."
        )

    @pytest.mark.parametrize(
        "text",
        [
            "# The cohort\n",
            "Use `cohort` here.\n",
            "```python\ncohort = 4\n```\n",
            "~~~\nthe cohort\n~~~\n",
            "| cohort | meaning |\n|---|---|\n",
            "[the cohort](methods.md)\n",
            "![the cohort](cohort.png)\n",
            "[x](cohort.md#the-cohort)\n",
            "<!-- the cohort -->\n",
            "<!-- generated: options -->\nthe cohort `x`\n<!-- end -->\n",
            "the sub-cohort, the cohort's size\n",
            "<https://example.org/cohort>\n",
        ],
    )
    def test_what_is_no_prose_is_left_alone(self, text):
        assert linked(text, [COHORT]) == text
        after = linked(text + "\nA cohort.", [COHORT])
        assert after == text + "\nA [cohort](glossary.md#cohort)."

    def test_cells_of_a_table_are_linked(self):
        text = "| a | b |\n|---|---|\n| x | the cohort |\n"
        assert linked(text, [COHORT]) == text.replace("cohort", "[cohort](glossary.md#cohort)")

    def test_links_follow_the_first_use(self):
        once = linked("First.\nA cohort.", [COHORT])
        assert linked(once, [COHORT]) == once
        moved = linked(once.replace("First.", "A cohort is first."), [COHORT])
        assert moved == "A [cohort](glossary.md#cohort) is first.\nA cohort."

    def test_links_made_by_hand_stay_and_count(self):
        text = "The [chosen clients](glossary.md#cohort) are the cohort."
        assert linked(text, [COHORT]) == text

    def test_code_that_shows_a_link_stays(self):
        text = "Write `[cohort](glossary.md#cohort)`. A [cohort](glossary.md#cohort)."
        assert linked(text, [COHORT]) == text

    def test_a_term_without_spellings_is_never_linked(self):
        assert linked("A report.", [Term("report", "A message.", link_words=())]) == "A report."

    def test_all_pages_but_some_are_linked(self, root, capsys):
        pages = {"docs/a.md": "A cohort.", "docs/methods/b.md": "A cohort.", "docs/errors.md": "A cohort."}
        for page, text in pages.items():
            (root / page).parent.mkdir(exist_ok=True)
            (root / page).write_text(text)
        glossary.main(["--link"], root)
        assert (root / "docs/a.md").read_text() == "A [cohort](glossary.md#cohort)."
        assert (root / "docs/methods/b.md").read_text() == "A [cohort](../glossary.md#cohort)."
        assert (root / "docs/errors.md").read_text() == "A cohort."
        capsys.readouterr()
        glossary.main(["--link"], root)
        assert capsys.readouterr().out == "wrote docs/glossary.md\n"


def test_prose_keeps_every_character_in_its_place():
    text = dedent("""\
        A `b
        c` d [e](f.md).

        ```
        g
        ```
        h
        """)
    result = prose(text)
    assert len(result) == len(text)
    assert [line.replace(glossary.MASK, "") for line in result.split("\n")] == [
        *("A ", " d [e].", "", "", "", "", "h", ""),
    ]


class TestVocabularyOfTheProject:
    TERMS = read_vocabulary().terms

    @pytest.mark.parametrize("term", TERMS, ids=[term.term for term in TERMS])
    def test_a_definition_is_one_or_two_full_sentences(self, term):
        text = term.definition
        assert text[0].isupper()
        assert text.endswith(".")
        assert 1 <= text.count(". ") + 1 <= 2
        assert "\n" not in text

    def test_every_unlinked_and_exempt_page_exists(self):
        vocabulary = read_vocabulary()
        named = vocabulary.exempt_pages | vocabulary.unlinked_pages
        assert [page for page in named if not (ROOT / page).exists()] == []
