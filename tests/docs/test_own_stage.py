"""The page on own stages is run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import engine, load, partition, tree
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job

PAGE = Path(__file__).parents[2] / "docs/own-stage.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def balanced(tmp_path, monkeypatch):
    (tmp_path / "balanced.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("balanced", None)
    import balanced

    return balanced.balanced


def test_the_stage_is_under_fifty_lines():
    stage = BLOCKS[0][BLOCKS[0].index("class CountLabels") :]
    assert len([line for line in stage.splitlines() if line.strip()]) < 50


def test_it_runs_and_chooses_flatter_cohorts(balanced, capsys):
    exec(compile(BLOCKS[1], "own-stage.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    plain, ours = (float(line.split()[-1]) for line in lines)
    assert ours > plain


def test_it_agrees_on_every_fleet(balanced):
    federation = partition(load("digits", max_train_samples=400), "dirichlet:0.3", clients=6, seed=0)
    experiments = [
        assemble(Job(rounds=2, cohort=3, fleet=name), balanced, federation)
        for name in ("plain", "vector", "pool", "flower")
    ]
    ends = [engine.run(experiment.method, make_fleet(experiment), rounds=2, seed=0) for experiment in experiments]
    for other in ends[1:]:
        assert tree.max_abs_difference(ends[0].state.models, other.state.models) < 1e-5
        assert tree.max_abs_difference(ends[0].state.memory, other.state.memory) == 0
        assert ends[0].ledger == other.ledger


def test_it_runs_from_the_shell(balanced):
    command = [
        "shoal",
        "run",
        "balanced:balanced",
        "--rounds",
        "2",
        "--clients",
        "6",
        "--set",
        "select.exponent=3",
        "--json",
    ]
    done = subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"method": "balanced:balanced"' in done.stdout
