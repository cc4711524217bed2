"""Dependencies point one way: methods -> stages -> {client, clusterers, selectors} -> types."""

import ast
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

TOP = ("experiment",)  # where everything is put together

# room -> rooms of the package that it may not import
FORBIDDEN = {
    "types": {"*"},
    "tree": {"client", "fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP, "cli"},
    "rng": {"client", "fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP, "cli"},
    "client": {"fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP},
    "clusterers": {"client", "fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP},
    "selectors": {"client", "fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP},
    "stages": {"fleet", "methods", "engine", "store", "cost", "data", *TOP},
    "methods": {"fleet", "engine", "store", "cost", "data", *TOP},
    "fleet": {"stages", "methods", "engine", "store", "cost", "data", *TOP},
    "models": {"client", "fleet", "stages", "methods", "engine", "store", "cost", "data", *TOP},
    "data": {"client", "fleet", "stages", "methods", "engine", "store", "cost", *TOP, "report"},
    "engine": {"methods", "stages", "store", "data", *TOP, "report"},
    "store": {"methods", "stages", "fleet", "data", *TOP, "report"},
    "serve": {"engine", "cost", "client", "report"},
    "report": {"methods", "stages", "fleet", "engine", "data", *TOP},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def room(module):
    parts = module.split(".")
    return parts[1] if parts[0] == "shoal" and len(parts) > 1 else None


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependencies_point_one_way(path):
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports(path):
        there = room(module)
        if here not in ("cli", "__main__"):
            assert there != "cli", "nothing imports the command line"
        if module.split(".")[0] == "flwr":
            allowed = (ROOT / "fleet/flower.py", ROOT / "fleet/messages.py")
            assert path in allowed or here == "deploy", "flwr is for the Flower fleet and deploy/ only"
        if there and there != here:
            forbidden = FORBIDDEN.get(here, set())
            assert there not in forbidden, f"{here} must not import {there}"
            assert "*" not in forbidden or there == "errors", "types imports nothing else"


def test_no_method_stage_program_or_fleet_knows_what_it_costs():
    users = {p.relative_to(ROOT).parts[0] for p in FILES for m in imports(p) if room(m) == "cost"}
    assert users <= {"cost", "engine.py", "experiment", "store", "report"}


def test_no_pickle_anywhere():
    for path in FILES:
        text = path.read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True"):
            assert word not in text, f"{path.name}: {word}"
