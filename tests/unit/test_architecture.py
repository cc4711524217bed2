"""Dependencies between rooms point one way: methods -> stages -> {client, clusterers, selectors} -> types."""

import ast
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

CORE = {"errors", "rng", "tree", "types"}

# room -> the rooms of the package that it may import, besides CORE; types imports errors only
ALLOWED = {
    "types": set(),
    "errors": set(),
    "rng": set(),
    "tree": set(),
    "metrics": set(),
    "codec": set(),
    "client_table": set(),
    "model_cache": {"client_table"},
    "report_validation": set(),
    "models": set(),
    "client": {"models", "report_validation"},
    "clusterers": set(),
    "selectors": set(),
    "stages": {"client", "client_table", "clusterers", "models", "selectors"},
    "methods": {"client", "client_table", "clusterers", "models", "selectors", "stages"},
    "data": set(),
    "fleet": {"client", "codec"},
    "deploy": {"client", "codec", "fleet"},
    "cost": {"codec"},
    "engine": {"client", "client_table", "cost", "fleet", "metrics", "model_cache", "report_validation"},
    "store": {"codec", "cost", "engine", "metrics"},
    "experiment": {
        *("client", "client_table", "clusterers", "cost", "data", "deploy", "engine", "fleet", "methods", "metrics"),
        *("models", "stages", "store"),
    },
    "report": {"cost", "store"},
    "reproduce": {"report", "store"},
    "serve": {"codec", "data", "experiment", "fleet", "methods", "models", "store"},
    "study": {"client", "engine", "experiment", "methods", "metrics", "report", "stages", "store"},
    "cli": {"data", "engine", "experiment", "fleet", "methods", "report", "reproduce", "serve", "store", "study"},
    "__main__": {"cli"},
    "__init__": {"data", "experiment", "methods"},
}
EXPERIMENT_MODULES_OF_SERVICE = {"shoal.experiment.job"}  # a service reads jobs, and assembles and runs nothing


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
    own_room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports(path):
        imported_room = room(module)
        if module.split(".")[0] == "flwr":
            allowed = (ROOT / "fleet/flower.py", ROOT / "fleet/messages.py")
            assert path in allowed or own_room == "deploy", "flwr is for the Flower fleet and deploy/ only"
        if imported_room in ALLOWED and imported_room != own_room:
            core = {"errors"} if own_room == "types" else CORE
            assert imported_room in ALLOWED[own_room] | core, f"{own_room} must not import {imported_room}"


def test_the_service_reads_jobs_and_assembles_nothing():
    imported = {m for p in FILES for m in imports(p) if p.is_relative_to(ROOT / "serve") and room(m) == "experiment"}
    assert {".".join(m.split(".")[:3]) for m in imported} == EXPERIMENT_MODULES_OF_SERVICE


def test_the_root_has_ten_modules():
    """The package itself and `python -m shoal` do not count."""
    modules = {p.stem for p in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert modules == {
        *(
            "client_table",
            "codec",
            "engine",
            "errors",
            "metrics",
            "model_cache",
            "report_validation",
            "rng",
            "tree",
            "types",
        ),
    }


def test_no_method_stage_program_or_fleet_knows_what_it_costs():
    users = {p.relative_to(ROOT).parts[0] for p in FILES for m in imports(p) if room(m) == "cost"}
    assert users <= {"cost", "engine.py", "experiment", "store", "report"}


def test_no_pickle_anywhere():
    for path in FILES:
        text = path.read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True"):
            assert word not in text, f"{path.name}: {word}"
