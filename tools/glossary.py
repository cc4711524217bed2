"""Writes docs/glossary.md from docs/vocabulary.toml, and links the other pages of docs/ to it.

python tools/glossary.py            write the page
python tools/glossary.py --check    end with exit code 1 if the page is not current
python tools/glossary.py --link     write the page, and link the first use of every term in the other pages
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = "glossary.md"
WIDTH = 120
MASK = "\0"  # stands for a character that is not prose: it is neither a letter nor a space, and no page has it

BEGIN = """# Glossary

These are the words that shoal uses in its documentation, its help texts and its code, explained for readers who know
machine learning. [Methods](methods.md) describes the methods, and [settings](settings.md) lists the settings of a job.

This page follows from `docs/vocabulary.toml`. Do not edit it by hand: [`make docs` writes it](contributing.md), and
`python tools/glossary.py --link` links the first use of every term in the other pages.
"""


@dataclass(frozen=True)
class Term:
    """A word of the glossary."""

    term: str
    definition: str
    avoid: tuple[str, ...] = ()  # words and phrases that the docs do not use for it
    use: str = ""  # what to write instead of them; empty: the term
    link_words: tuple[str, ...] | None = None  # spellings that --link looks for; None: the term itself

    @property
    def anchor(self) -> str:
        """The anchor that a page gets for the term's heading."""
        return re.sub(r"[^\w\- ]", "", self.term.lower()).replace(" ", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.term,) if self.link_words is None else self.link_words


@dataclass(frozen=True)
class Style:
    """A plain word that needs no definition, and what the docs do not use for it."""

    use: str
    avoid: tuple[str, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The content of docs/vocabulary.toml."""

    terms: tuple[Term, ...]
    style: tuple[Style, ...] = ()
    allowed_phrases: tuple[str, ...] = ()  # phrases in which an avoided word is right
    exempt_pages: frozenset[str] = frozenset()  # paths of pages in which every word is allowed
    unlinked_pages: frozenset[str] = frozenset()  # paths of pages that --link leaves alone

    def avoided(self) -> dict[str, str]:
        """Returns every avoided word, with the word to use."""
        words = {word: term.use or term.term for term in self.terms for word in term.avoid}
        return words | {word: style.use for style in self.style for word in style.avoid}


def read_vocabulary(path: Path = DOCS / "vocabulary.toml") -> Vocabulary:
    """Returns the vocabulary in a file.

    Raises
    ------
    ValueError
        If a key is unknown or missing, or if a word is in two places.
    """
    content = tomllib.loads(path.read_text())
    unknown = content.keys() - {"term", "style", "allowed_phrases", "exempt_pages", "unlinked_pages"}
    if unknown:
        raise ValueError(f"{path.name} has the unknown key {min(unknown)}.")
    vocabulary = Vocabulary(
        terms=tuple(Term(**_entry(Term, table)) for table in content.get("term", ())),
        style=tuple(Style(**_entry(Style, table)) for table in content.get("style", ())),
        allowed_phrases=tuple(content.get("allowed_phrases", ())),
        exempt_pages=frozenset(content.get("exempt_pages", ())),
        unlinked_pages=frozenset(content.get("unlinked_pages", ())),
    )
    _refuse_repeated("term", [term.term for term in vocabulary.terms])
    _refuse_repeated("spelling", [s.lower() for term in vocabulary.terms for s in term.spellings])
    avoided = [term.avoid for term in vocabulary.terms] + [style.avoid for style in vocabulary.style]
    _refuse_repeated("avoided word", [word.lower() for words in avoided for word in words])
    return vocabulary


def _entry(kind: type[Term] | type[Style], table: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := table.keys() - {field.name for field in fields(kind)}:
        raise ValueError(f"{dict(table)} has the unknown key {min(unknown)}.")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def _refuse_repeated(what: str, words: Sequence[str]) -> None:
    repeated = {word for word in words if words.count(word) > 1}
    if repeated:
        raise ValueError(f"The {what} {min(repeated)!r} is in two places.")


def pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for any of the words or phrases, as whole words. A phrase may continue on the next line."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    phrases = (r"[ \t]*[ \t\n][ \t]*".join(map(re.escape, word.split())) for word in longest_first)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(phrases)})(?![\w-])", re.IGNORECASE)


GENERATED = re.compile(r"<!-- generated.*?<!-- end -->", re.DOTALL)
CODE = (
    re.compile(r"^[ \t]*(```+|~~~+).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL),  # in blocks
    re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\1(?!`)", re.DOTALL),  # in a line
)
NOT_PROSE = (
    *CODE,
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(?<=\])\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*\)"),  # where a link leads
    re.compile(r"^\[[^\]]+\]:.*$", re.MULTILINE),  # where a link leads, at the end of the page
    re.compile(r"https?://[^\s)>]+"),
)
NOT_LINKED = (
    GENERATED,
    re.compile(r"^#{1,6}[ \t].*$", re.MULTILINE),  # headings
    re.compile(r"^\|.*\n(?=\|[ \t]*:?-)", re.MULTILINE),  # headers of tables
    re.compile(r"\[[^\[\]]*(?=\][(\[])"),  # texts of links and images
)


def mask(text: str, patterns: Iterable[re.Pattern[str]]) -> str:
    """Returns the text with `MASK` for every character in a match, except for line ends."""
    for each in patterns:
        text = each.sub(lambda match: re.sub(r"[^\n]", MASK, match[0]), text)
    return text


def prose(text: str) -> str:
    """Returns the text of a page without code, comments and targets of links. Every other character stays in place."""
    return mask(text, NOT_PROSE)


def glossary_page(vocabulary: Vocabulary) -> str:
    """Returns the text of docs/glossary.md."""
    terms = sorted(vocabulary.terms, key=lambda term: term.term.lower())
    return BEGIN + "".join(f"\n## {term.term}\n\n{_definition(term, terms)}\n" for term in terms)


def _definition(term: Term, terms: Sequence[Term]) -> str:
    """Returns the definition with links to the other terms that it uses."""
    paragraph = _with_links(term.definition, [other for other in terms if other != term], "")
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def linked(text: str, terms: Sequence[Term], page: str = PAGE) -> str:
    """Returns the text of a page with a link at the first use of every term, and with no other link that this made.

    Parameters
    ----------
    text : str
        The page.
    terms : Sequence[Term]
        The terms to link.
    page : str
        The path from the page's folder to the glossary.

    Returns
    -------
    str
        The page with links.
    """
    return _with_links(_without_links(text, terms, page), terms, page)


def _without_links(text: str, terms: Sequence[Term], page: str) -> str:
    """Links whose text is a spelling of their term were made here. Others were made by hand, and stay."""
    for term in terms:
        if term.spellings:
            words = pattern(term.spellings).pattern
            link = re.compile(rf"\[({words})\]\({re.escape(page)}#{re.escape(term.anchor)}\)", re.IGNORECASE)
            text = _without_link(text, link)
    return text


def _without_link(text: str, link: re.Pattern[str]) -> str:
    """The link is replaced by its text, except in code and in generated blocks."""
    visible = mask(text, (GENERATED, *CODE))
    return link.sub(lambda match: match[0] if visible[match.start()] == MASK else match[1], text)


def _with_links(text: str, terms: Sequence[Term], page: str) -> str:
    by_spelling = {spelling.lower(): term for term in terms for spelling in term.spellings}
    visible = mask(text, (GENERATED, *CODE))
    done = {term.anchor for term in terms if f"({page}#{term.anchor})" in visible}
    candidates = prose(mask(text, NOT_LINKED))  # in this order: the comments around a generated block are no prose
    parts, end = [], 0
    for match in pattern(by_spelling).finditer(candidates) if by_spelling else ():
        term = by_spelling[" ".join(match[0].lower().split())]
        if term.anchor not in done and not candidates.startswith(("'", "’"), match.end()):
            done.add(term.anchor)
            parts += [text[end : match.start()], f"[{match[0]}]({page}#{term.anchor})"]
            end = match.end()
    return "".join([*parts, text[end:]])


def link_pages(vocabulary: Vocabulary, root: Path) -> list[Path]:
    """Links the terms in the pages of docs/, and returns the pages that changed."""
    changed = []
    for path in sorted((root / "docs").rglob("*.md")):
        if path == root / "docs" / PAGE or path.relative_to(root).as_posix() in vocabulary.unlinked_pages:
            continue
        text = path.read_text()
        steps_up = len(path.relative_to(root / "docs").parts) - 1
        if (new := linked(text, vocabulary.terms, "../" * steps_up + PAGE)) != text:
            path.write_text(new)
            changed.append(path)
    return changed


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(description="Write docs/glossary.md from docs/vocabulary.toml.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="Write nothing. Fail if the page is not current.")
    action.add_argument("--link", action="store_true", help="Link the first use of every term in the other pages too.")
    asked = parser.parse_args(arguments)
    page, vocabulary = root / "docs" / PAGE, read_vocabulary(root / "docs" / "vocabulary.toml")
    if asked.check:
        if page.exists() and page.read_text() == glossary_page(vocabulary):
            return 0
        print("docs/glossary.md is not current: run `make docs`", file=sys.stderr)
        return 1
    page.write_text(glossary_page(vocabulary))
    for path in [page, *(link_pages(vocabulary, root) if asked.link else ())]:
        print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
