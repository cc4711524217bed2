"""The page on own pieces is followed as it is written."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import foreign_pieces
import pytest
import torch
from federations import tiny_federation
from installed import forget_pieces_afterwards, install
from typer.testing import CliRunner

import shoal
from shoal import engine, tree
from shoal.cli import app
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.recipe import load_recipe
from shoal.methods.composition import capability
from shoal.types import ServerState

PAGE = (Path(__file__).parents[2] / "docs/own-piece.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = {m[1]: text for _, text in BLOCKS if (m := re.match(r"# ([\w/.-]+\.\w+)\n", text))}
SCRIPTS = [text for language, text in BLOCKS if language == "python" and text not in FILES.values()]
CONSOLE = "".join(text for language, text in BLOCKS if language == "console")
COMMANDS = re.findall(r"^\$ shoal (.*)\n(error: .*)?", CONSOLE, re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The reader's folder, with every file that the page shows."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    forget_pieces_afterwards(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pieces"]:
        del sys.modules[name]


def test_the_modules_are_short():
    modules = {name: text for name, text in FILES.items() if name.endswith(".py")}
    assert len(modules) == 3
    assert all(len(text.splitlines()) <= 40 for text in modules.values())


@pytest.mark.parametrize(("command", "refusal"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_do_what_the_page_says(command, refusal, folder):
    if "my_pieces" not in command:  # the page says to install the package before it uses names
        install(folder, FILES["pyproject.toml"])
    result = CliRunner().invoke(app, shlex.split(command, comments=True))
    assert result.exit_code == (2 if refusal else 0), result.stderr
    assert refusal in " ".join(result.stderr.split())


def test_every_command_is_read():
    assert len(COMMANDS) == 6
    assert sum(bool(refusal) for _, refusal in COMMANDS) == 1


def test_the_mixed_method_finds_the_planted_groups_and_every_client_has_a_gate():
    job = load_recipe(Path("mixed.toml"), {}).single_job
    fleet = shoal.partition(shoal.load("digits"), job.partition, clients=job.clients, seed=0)
    private = {}
    experiment = assemble(job.model_copy(update={"fleet": "vector"}), job.method, fleet)
    result = engine.run(experiment.method, make_fleet(experiment, private), rounds=1, seed=0)
    assert {(fleet.planted_groups[c], *experts) for c, experts in result.clusters.items()} == {
        (0, "expert-000"),
        (1, "expert-001"),
    }
    assert all("gate" in state for state in private.values())


def test_the_script_runs(capsys):
    (script,) = SCRIPTS
    exec(compile(script, "own-piece.md", "exec"), {})
    assert "expert-001" in capsys.readouterr().out


@pytest.mark.parametrize(("min_per_cluster", "expected"), [(0, [4, 0]), (1, [4, 1])])
def test_a_cohort_has_clients_of_every_cluster(min_per_cluster, expected):
    """One of 9 clients is alone in its cluster. Its share of a cohort of 4 is 4/9, which is rounded to 0."""
    from my_pieces.stratified import Stratified

    first, second = torch.eye(2)
    membership = {f"c{i}": first for i in range(8)} | {"c8": second}
    state = ServerState(0, {}, membership, tuple(membership), cohort_size=4)
    cohort = list(Stratified(min_per_cluster).choose(state, seed=1))
    clusters = [state.cluster_of(c) for c in cohort]
    assert [clusters.count(0), clusters.count(1)] == expected
    assert len(set(cohort)) == len(cohort)


def trained(aggregate, **options):
    """Returns the models after a round of three clients with equal weights."""
    all_options = {"train": {"weighting": "uniform"}, **({"aggregate": options} if options else {})}
    return shoal.run(
        {"aggregate": aggregate}, tiny_federation(3), rounds=1, cohort=3, fleet="plain", set=all_options
    ).state.models


def test_a_mean_of_which_nothing_is_trimmed_is_the_mean_and_of_which_all_is_trimmed_the_median():
    own = "my_pieces.trimmed:TrimmedMean"
    assert tree.max_abs_difference(trained(own, trim_fraction=0.0), trained("mean")) < 1e-6
    assert tree.max_abs_difference(trained(own, trim_fraction=0.4), trained(foreign_pieces.Median)) == 0
    assert tree.max_abs_difference(trained(own, trim_fraction=0.4), trained("mean")) > 1e-3


def test_every_capability_of_the_table_exists():
    named = re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE)
    assert len(named) == 10
    assert all(isinstance(getattr(capability, name), capability.Capability) for name in named)
