"""The installed package: built as a wheel, installed in another folder than the checkout, and run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
SMALL = [
    "--seed",
    "0",
    "--rounds",
    "1",
    "--clients",
    "4",
    "--cohort",
    "2",
    "--max-train-samples",
    "200",
    "--fleet",
    "vector",
]


def output_of(*words, **options):
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    output_of(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (file,) = folder.glob("shoal-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that contains only the package. Its dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    output_of(*PIP, "install", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


@pytest.fixture
def run_installed(installed, tmp_path):
    """Runs a program in an empty folder. The installed package comes before an editable one."""
    return lambda *words: output_of(*words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)})


def test_a_wheel_has_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("shoal/")}
    assert packaged == files
    assert {"shoal/report/page.html", "shoal/recipes/002-table1.toml", "shoal/py.typed"} <= packaged


def test_an_installed_package_runs_a_recipe_by_its_name(run_installed, installed, tmp_path):
    path = run_installed(sys.executable, "-c", "import shoal; print(shoal.__file__)")
    assert Path(path.strip()).is_relative_to(installed)
    result = json.loads(run_installed(sys.executable, "-m", "shoal", "run", "plain-digits", *SMALL, "--json"))
    assert [run["method"] for run in result["runs"]] == ["fedavg", "fedprox", "fedavg-ft", "local", "centralised"]
    assert (tmp_path / "runs/plain-digits/report.html").stat().st_size > 100_000


def test_the_installed_command_lists_recipes_and_shows_help(run_installed, installed):
    shoal = installed / "bin/shoal"
    listed = json.loads(run_installed(shoal, "recipes", "--json"))
    assert {"002-table1", "methods/fedepc"} <= {recipe["name"] for recipe in listed["recipes"]}
    assert [study["name"] for study in listed["studies"]] == ["study/own"]
    assert "four methods" in run_installed(shoal, "demo", "--help")
