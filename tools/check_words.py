"""Checks the names in the code, the help texts and the documentation against the project's vocabulary.

- No class, function, parameter, field, option or JSON key has a name of docs/old_names.toml.
- Every help text consists of full sentences and has none of the words that docs/vocabulary.toml avoids.
- No page has an avoided word outside code.

It prints a line for each finding, and its exit code is 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from glossary import MASK, ROOT, Vocabulary, mask, pattern, prose, read_vocabulary

Kind = Literal["class", "function", "parameter", "field", "option", "constant", "group", "key"]
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_CODE: frozenset[Kind] = frozenset(KINDS) - {"key", "group"}  # the kinds that [names] is about
CODE = ("src/shoal", "tests", "benchmarks")
HELP = "src/shoal"


@dataclass(frozen=True, order=True)
class Finding:
    """Something to change at a place of a file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def replace_word(path: str, line: int, word: str, use: str) -> Finding:
    """Returns the finding that a word should be replaced."""
    return Finding(path, line, f'word "{word}": use "{use}"')


# --- Names in the code ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A name that the code defines, or a key that it writes."""

    name: str
    kinds: frozenset[Kind]
    owners: tuple[str, ...]  # what it is in, outermost first: classes, functions, constants, keys of dicts
    path: str
    line: int


@dataclass(frozen=True)
class OldName:
    """A name that definitions no longer have, everywhere or in a scope."""

    name: str
    use: str
    kinds: frozenset[Kind]
    owners: frozenset[str] = frozenset()  # one of them is around the definition; empty: anything may be
    paths: tuple[str, ...] = ()  # the file, or a folder above it, is one of these; empty: any file

    def matches(self, definition: Definition, owners: Iterable[str]) -> bool:
        """Whether it is this definition's name, given the owners with the base classes of classes."""
        return (
            bool(self.kinds & definition.kinds)
            and (not self.owners or not self.owners.isdisjoint(owners))
            and (not self.paths or any(f"{definition.path}/".startswith(f"{path}/") for path in self.paths))
        )


@dataclass(frozen=True)
class OldNames:
    """The content of docs/old_names.toml."""

    names: tuple[OldName, ...]
    allowed: frozenset[str]  # PATH:NAME


def read_old_names(path: Path) -> OldNames:
    """Returns the old names in a file.

    Raises
    ------
    ValueError
        If a key or a kind is unknown.
    """
    content = tomllib.loads(path.read_text())
    if unknown := content.keys() - {"names", "keys", "scoped", "allowed"}:
        raise ValueError(f"{path.name} has the unknown key {min(unknown)}.")
    names = [OldName(old, new, IN_CODE) for old, new in content.get("names", {}).items()]
    names += [OldName(old, new, frozenset({"key"})) for old, new in content.get("keys", {}).items()]
    names += [_scoped(entry) for entry in content.get("scoped", ())]
    return OldNames(tuple(names), frozenset(content.get("allowed", ())))


def _scoped(entry: Mapping[str, Any]) -> OldName:
    if unknown := entry.keys() - {"name", "use", "kind", "owner", "path"}:
        raise ValueError(f"{dict(entry)} has the unknown key {min(unknown)}.")
    kinds = _listed(entry["kind"])
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"{dict(entry)} has the unknown kind {min(unknown)}.")
    return OldName(
        entry["name"],
        entry["use"],
        frozenset(kind for kind in KINDS if kind in kinds),
        frozenset(_listed(entry.get("owner", []))),
        tuple(_listed(entry.get("path", []))),
    )


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class _Definitions(ast.NodeVisitor):
    """Collects the definitions of a module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.owners: list[str] = []
        self.found: list[Definition] = []
        self.bases: dict[str, set[str]] = {}  # of each class, the names of its base classes

    def add(self, name: str, kinds: Iterable[Kind], line: int) -> None:
        self.found.append(Definition(name, frozenset(kinds), tuple(self.owners), self.path, line))

    def inside(self, owner: str, nodes: Iterable[ast.AST]) -> None:
        self.owners.append(owner)
        for node in nodes:
            self.visit(node)
        self.owners.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.add(node.name, ["class"], node.lineno)
        self.bases[node.name] = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        self.owners.append(node.name)
        for statement in node.body:
            for name, value in _assigned(statement):
                self.add(name, ["field", "option"] if _is_call(value, "option") else ["field"], statement.lineno)
                if name == "group" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    self.add(value.value, ["group"], statement.lineno)
        self.owners.pop()
        self.inside(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.add(node.name, ["function"], node.lineno)
        self.inside(node.name, [node.args, *node.body])

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)  # the parameters of a lambda are as short as a line

    def visit_arg(self, node: ast.arg) -> None:
        self.add(node.arg, ["parameter"], node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            self.add(node.attr, ["field"], node.lineno)
        self.generic_visit(node)

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            names = _assigned(statement)
            for name, value in names:
                self.add(name, ["constant"], statement.lineno)
                self.owners.append(name)
                for key in _texts(value):
                    self.add(str(key.value), ["key"], key.lineno)
                self.owners.pop()
                self.inside(name, [value] if value else [])
            if not names:
                self.visit(statement)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.add(key.value, ["key"], key.lineno)
                self.inside(key.value, [value])
            else:
                self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "dict":
            for keyword in node.keywords:
                if keyword.arg:
                    self.add(keyword.arg, ["key"], keyword.value.lineno)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.ctx, ast.Store) and isinstance(key, str):
            self.add(key, ["key"], node.lineno)
        self.generic_visit(node)


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """The plain names that a statement assigns to, with the value."""
    if isinstance(statement, ast.AnnAssign):
        targets: list[ast.expr] = [statement.target]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return [(target.id, value) for target in targets if isinstance(target, ast.Name)]


def _texts(value: ast.expr | None) -> list[ast.Constant]:
    """The texts in a tuple or list, which may be keys: `ENERGY_PARTS = ("preparation", "training")`."""
    elements = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    return [e for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]


def _is_call(value: ast.expr | None, *names: str) -> TypeGuard[ast.Call]:
    """Whether a value is a call of one of these functions, such as `option` or `typer.Option`."""
    return isinstance(value, ast.Call) and ast.unparse(value.func) in names


def name_findings(sources: Mapping[str, str], old: OldNames) -> Iterator[Finding]:
    """Yields the definitions that have an old name. Sources are texts of modules by their paths."""
    found: list[Definition] = []
    bases: dict[str, set[str]] = {}
    for path, text in sources.items():
        collected = _Definitions(path)
        collected.visit(ast.parse(text, path))
        found += collected.found
        for name, names in collected.bases.items():
            bases[name] = bases.get(name, set()) | names
    by_name: dict[str, list[OldName]] = {}
    for entry in old.names:
        by_name.setdefault(entry.name, []).append(entry)
    for definition in found:
        if f"{definition.path}:{definition.name}" not in old.allowed and definition.name in by_name:
            owners = _with_bases(definition.owners, bases)
            for entry in by_name[definition.name]:
                if entry.matches(definition, owners):
                    yield replace_word(definition.path, definition.line, definition.name, entry.use)


def _with_bases(owners: Sequence[str], bases: Mapping[str, set[str]]) -> set[str]:
    """The owners, their base classes, and the base classes of these."""
    reached, left = set[str](), list(owners)
    while left:
        owner = left.pop()
        if owner not in reached:
            reached.add(owner)
            left += bases.get(owner, ())
    return reached


# --- Help texts -------------------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Lists of words, not a grammar: a fragment with a noun that looks like one of these verbs is not noticed.
IMPERATIVES = _words("""
accept add adjust aggregate allow answer apply ask assign assume average balance call cap change charge check choose
clip collect combine compare compute continue convert copy correct create define delete derive describe disable discard
display divide do download draw drop enable end estimate evaluate exchange exclude execute explain explore export fill
find fine-tune finish follow form freeze generate give go hide ignore improve include increase infer initialise judge
keep learn leave let listen look lower make merge multiply normalise omit open pick predict prefer prepare print profile
provide put raise read recompute reduce refuse remove repeat replace represent require reset restrict resume retrain
return reweight run save say search select send serve show shuffle simulate skip smooth sort specify stop store subtract
switch take train transform treat try tune turn update use validate wait write
""")
NOUNS_TOO = _words("""
change cluster count cut fit group label limit list load log map mark mask match measure mix model move name order
place probe process query rank record report scale set share split start sum survey test weight
""")  # imperatives if one of the following words is next: "Weight the models", but not "Weight decay"
AFTER_AN_IMPERATIVE = _words("""
the a an this these that those its their each every all any no one both two it them only also again not at in by for
from on to with once clients models updates samples sparsity
""")
OBJECTS = _words("the a an this these its each every all any no one both only again it them clients samples")
BEFORE_AN_IMPERATIVE = _words("after at before by during for from if in on when where with without")
AUXILIARIES = _words("can cannot could do does did may might must should will would")
FINITE = AUXILIARIES | _words("""
is are was were has have had
agree become behave belong bring come connect contain count decide depend differ exist fit follow get give grow happen
hold include join keep last lead lie lower make matter mean need pass predict receive remain send stack stand start stay
take train vary win work
""")
PLURALS = _words("""
averages balances calls caps changes counts displays downloads estimates exchanges exports increases means returns runs
sets splits stacks updates
""")  # mostly nouns: a verb if one of OBJECTS is next
CLAUSE = _words("which that who whose whom where when whenever while if unless because whether what how")
_AFTER_AUXILIARY = re.compile(
    rf"\b({'|'.join(sorted(AUXILIARIES))})(?: (?:not|never|already|only|also|still))? [a-z-]+"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Eq\.)(?<!Alg\.)(?<!Fig\.)(?<!Sec\.)(?<!al\.)\s+(?=[A-Z0-9`])")


@dataclass(frozen=True)
class HelpText:
    """A text that explains an option, a setting, an argument or a command to users."""

    text: str
    path: str
    line: int


def help_texts(path: str, source: str) -> Iterator[HelpText]:
    """Yields the help texts of a module: of `option` and `setting`, of typer's classes, and of commands."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Call) and (text := _help_of_call(node)) is not None:
            yield HelpText(" ".join(text.split()), path, node.lineno)
        elif isinstance(node, ast.FunctionDef) and any(_is_command(decorator) for decorator in node.decorator_list):
            summary = (ast.get_docstring(node) or "").split("\n\n")[0]
            yield HelpText(" ".join(summary.split()), path, node.lineno)


def _help_of_call(call: ast.Call) -> str | None:
    named = [k.value for k in call.keywords if k.arg in ("help", "description")]
    if _is_call(call, "option", "setting"):
        return _literal([*call.args[1:2], *named])
    return _literal(named) if _is_call(call, "typer.Option", "typer.Argument", "typer.Typer") else None


def _is_command(decorator: ast.expr) -> bool:
    """Whether it is `@app.command()` of typer."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(".command")


def _literal(values: Sequence[ast.expr]) -> str | None:
    """The text of a string. A field of an f-string counts as the word "value"; other expressions have no text."""
    match values:
        case [ast.Constant(value=str(text))]:
            return text
        case [ast.JoinedStr(values=parts)]:
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in parts)
    return None


def has_verb(sentence: str) -> bool:
    """Returns whether a sentence is an imperative, or has a finite verb outside of its subordinate clauses.

    Each of "which", "if" and the like takes the next verb for its clause. So "Samples on which models are compared."
    has none left.
    """
    text = re.sub(r"`[^`]*`", "code", sentence).lower()
    first, *rest = text.split(", ", 1)
    is_introduction = first.split(" ")[0] in BEFORE_AN_IMPERATIVE
    is_enumeration = first in NOUNS_TOO  # an imperative only if the next word is one: "List, download and show"
    introduced = rest if is_introduction or is_enumeration else []
    return any(_is_imperative(clause) for clause in (first, *introduced)) or _has_finite_verb(text)


def _is_imperative(clause: str) -> bool:
    words = re.findall(r"[a-z0-9][\w'-]*", clause)
    while words and words[0] in ("also", "always", "never", "only", "then", "and", "or"):
        del words[0]
    first, second = (*words, "", "")[:2]
    return (first in IMPERATIVES and second != "of") or (first in NOUNS_TOO and second in AFTER_AN_IMPERATIVE)


def _has_finite_verb(text: str) -> bool:
    in_clause = False
    words = re.findall(r"[a-z0-9](?:[a-z0-9'.-]*[a-z0-9])?", _AFTER_AUXILIARY.sub(r"\1", text))
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word in CLAUSE:
            in_clause = True
        elif in_clause and word.endswith("ed"):
            in_clause = False  # the verb of the clause: "rounds in which two clients trained"
        elif _is_finite(word, before, after):
            if not in_clause:
                return True
            in_clause = False
    return False


def _is_finite(word: str, before: str, after: str) -> bool:
    """Whether a word is a verb between its neighbours, as in "0 probes only once" and "it probes the model"."""
    verbs = _without_s(word)
    if word in FINITE or (verbs & (FINITE | IMPERATIVES) and word not in PLURALS):
        return True
    return bool(verbs) and (before in ("0", "1") or bool(verbs & (IMPERATIVES | NOUNS_TOO) and after in OBJECTS))


def _without_s(word: str) -> set[str]:
    """The verbs of which a word may be the third person: "applies" of "apply". Empty without an -s."""
    return {word[:-1], word.removesuffix("es"), word.removesuffix("ies") + "y"} if word.endswith("s") else set()


def help_findings(path: str, source: str, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Yields what is wrong with the help texts of a module."""
    for text in help_texts(path, source):
        yield from (Finding(path, text.line, f'help text "{shortened(text.text)}": {why}') for why in _wrong(text.text))
        for _, word, use in avoided_words(re.sub(r"`[^`]*`", MASK, text.text), vocabulary):
            yield replace_word(path, text.line, word, use)


def _wrong(text: str) -> Iterator[str]:
    if not text[:1].isupper():
        yield "begin with a capital letter"
    if not text.endswith("."):
        yield "end with a full stop"
    for sentence in _SENTENCE_END.split(text):
        if not has_verb(sentence):
            yield f'write "{shortened(sentence)}" as a sentence with a verb' if sentence != text else "add a verb"


def shortened(text: str, length: int = 60) -> str:
    """Returns the first words of a text."""
    return text if len(text) <= length else text[:length].rsplit(" ", 1)[0] + " ..."


# --- Pages ------------------------------------------------------------------------------------------------------------


def avoided_words(text: str, vocabulary: Vocabulary) -> Iterator[tuple[int, str, str]]:
    """Yields the avoided words in a text: where each begins, the word, and the one to use."""
    use_of = {word.lower(): use for word, use in vocabulary.avoided().items()}
    if vocabulary.allowed_phrases:
        text = mask(text, [pattern(vocabulary.allowed_phrases)])
    for match in pattern(use_of).finditer(text) if use_of else ():
        word = " ".join(match[0].split())
        yield match.start(), word, use_of[word.lower()]


def page_findings(path: str, text: str, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Yields the avoided words in the prose of a page."""
    for start, word, use in avoided_words(prose(text), vocabulary):
        yield replace_word(path, text.count("\n", 0, start) + 1, word, use)


# --- All of it --------------------------------------------------------------------------------------------------------


def all_findings(root: Path) -> list[Finding]:
    """Returns all findings in a checkout of the project."""
    vocabulary, old = read_vocabulary(root / "docs/vocabulary.toml"), read_old_names(root / "docs/old_names.toml")
    modules = {p.relative_to(root).as_posix(): p.read_text() for top in CODE for p in (root / top).rglob("*.py")}
    findings = list(name_findings(modules, old))
    for path, text in modules.items():
        if path.startswith(f"{HELP}/"):
            findings += help_findings(path, text, vocabulary)
    for page in pages(root, vocabulary):
        findings += page_findings(page.relative_to(root).as_posix(), page.read_text(), vocabulary)
    return sorted(set(findings))


def pages(root: Path, vocabulary: Vocabulary) -> list[Path]:
    """Returns the pages that are checked."""
    all_pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [p for p in all_pages if p.exists() and p.relative_to(root).as_posix() not in vocabulary.exempt_pages]


def main(root: Path = ROOT) -> int:
    """Prints the findings, and returns the exit code."""
    findings = all_findings(root)
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings; docs/vocabulary.toml and docs/old_names.toml have the words", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
