"""No module outside a step knows the pieces of the step by name, because capabilities decide which pieces fit together.

The named methods in `methods/*.py` are exempt: they are compositions, so they list piece names. Recipes list them too,
but they are no modules. Only the registry imports classes of pieces.

Many piece names are ordinary words ("none", "mean", "labels", "update"), so a text alone is no piece name. It counts as
one if the code uses it as one:

- compared with an attribute `.name` or `.piece`, or with `steps["cluster"]` or `steps.get("cluster")`;
- in a mapping from steps to pieces: `{"cluster": "aidc"}`, `steps["cluster"] = "aidc"`, `f(cluster="aidc")`;
- given to `uses`, `provides`, `require`, `piece_class` or `register`;
- in a text that is a composition from its beginning to its end, such as "cluster=aidc,train=proximal".

A stage may have the name of a piece, such as "prior": code that looks for a stage compares with a constant.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shoal
from shoal.methods.composition.piece import STEPS, pieces

ROOT = Path(shoal.__file__).parent
PIECES = "shoal.methods.pieces"
COMPOSITIONS = set(ROOT.glob("methods/[!_]*.py"))
FILES = sorted(set(ROOT.rglob("*.py")) - COMPOSITIONS)
FUNCTIONS_OF_PIECE_NAMES = ("uses", "provides", "require", "piece_class", "register")
COMPOSITION = re.compile(rf"(?:({'|'.join(STEPS)})=([\w+-]+)(?:,|$))+")


def texts(node):
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def step_of(node):
    """Returns the step in `steps["cluster"]` and `steps.get("cluster")`."""
    key = node.slice if isinstance(node, ast.Subscript) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key = node.args[0]
    return key.value if isinstance(key, ast.Constant) and key.value in STEPS else None


def named_in(node):
    """Yields (step, text) for every text that serves as a piece name. The step is None if the code does not say."""
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            pieces_of_code = [s for s in sides if step_of(s) or getattr(s, "attr", None) in ("name", "piece")]
            for side in (s for s in sides if pieces_of_code and s not in pieces_of_code):
                yield from ((step_of(pieces_of_code[0]), text) for text in texts(side))
        case ast.Match(subject=ast.Attribute(attr="name" | "piece")):
            yield from ((None, text) for case in node.cases for text in texts(case.pattern))
        case ast.Dict():
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in STEPS:
                    yield from ((key.value, text) for text in texts(value))
        case ast.Assign(targets=[ast.Subscript() as target]) if step_of(target):
            yield from ((step_of(target), text) for text in texts(node.value))
        case ast.keyword(arg=str() as step) if step in STEPS and isinstance(node.value, ast.Constant):
            yield from ((step, text) for text in texts(node.value))
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in FUNCTIONS_OF_PIECE_NAMES:
            yield from ((None, text) for argument in node.args for text in texts(argument))
        case ast.Constant(value=str() as text) if COMPOSITION.fullmatch(text):
            for part in text.split(","):
                step, _, names = part.partition("=")
                yield from ((step, name) for name in names.split("+"))


def couplings(source, own_step=None):
    """Returns the pieces of other steps that a module knows by name or by class."""
    tree, known_pieces = ast.parse(source), set()
    for node in ast.walk(tree):
        for step, text in named_in(node):
            steps = [s for s in ([step] if step else STEPS) if text in pieces()[s]]
            if own_step not in steps:
                known_pieces |= {(s, text) for s in steps}
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == PIECES:
            modules += [f"{PIECES}.{alias.name}" for alias in node.names]
        for module in modules:
            step, _, rest = module.removeprefix(f"{PIECES}.").partition(".")
            if module.startswith(f"{PIECES}.") and step != own_step:
                known_pieces.add((step, rest or "*"))
    return known_pieces


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_knows_a_piece_of_another_step(path):
    is_piece = path.is_relative_to(ROOT / "methods/pieces") and path.parent.name in STEPS
    assert couplings(path.read_text(), path.parent.name if is_piece else None) == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("part.piece == 'aidc'", {("cluster", "aidc")}),
        ("'aidc' != piece.name", {("cluster", "aidc")}),
        ("piece.name in ('shift', 'gate')", {("cluster", "shift"), ("personalise", "gate")}),
        ("steps['serve'] == 'prior'", {("serve", "prior")}),
        ("steps.get('cluster') == 'none'", {("cluster", "none")}),
        ("steps['serve'] = 'prior' if x else 'plain'", {("serve", "prior"), ("serve", "plain")}),
        ("{'cluster': 'mctc'}", {("cluster", "mctc")}),
        ("compose(select='bandit')", {("select", "bandit")}),
        ("method.uses('fine-tune')", {("personalise", "fine-tune")}),
        ("of_pieces('cluster=aidc,serve=plain+prior')", {("cluster", "aidc"), ("serve", "plain"), ("serve", "prior")}),
        ("match piece.name:\n    case 'mctc': pass", {("cluster", "mctc")}),
        ("from shoal.methods.pieces.cluster.aidc import AdaptiveClusters", {("cluster", "aidc")}),
        ("from shoal.methods.pieces.cluster import aidc", {("cluster", "*")}),
        ("from shoal.methods.pieces import cluster", {("cluster", "*")}),
        ("import shoal.methods.pieces.select.bandit", {("select", "bandit")}),
        ("setting.make('gate', Gate)\nx = 'mean'\nrule.mask == 'none'\n'such as cluster=aidc'", set()),
        ("reduction(train='mean', by='labels')\n{'mean': 'none'}", set()),
    ],
)
def test_the_test_sees_what_is_used_as_a_piece_name(source, expected):
    assert couplings(source) == expected


def test_a_piece_may_name_itself():
    assert couplings("@register('personalise', 'gate')\nclass Gate: pass", "personalise") == set()
    assert couplings("@register('personalise', 'gate')\nclass Gate: pass", "cluster") == {("personalise", "gate")}


def test_a_named_method_is_a_composition_of_pieces():
    known_pieces = couplings((ROOT / "methods/fedepc.py").read_text())
    assert known_pieces == {("represent", "sparsity"), ("cluster", "aidc"), ("select", "bandit"), ("train", "proximal")}
