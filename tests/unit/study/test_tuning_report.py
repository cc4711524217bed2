"""The choices of tuned fine-tuning, and those at an edge of the grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.experiment.job import Job
from shoal.store.reader import RunRecord
from shoal.study.measurements import StudyRun, StudyRuns
from shoal.study.plan import Entry
from shoal.study.tuning_report import TuningChoice, tuning_choice, tuning_table


def tuned(epochs=5.0, lr=0.02, seed=0, variant="a", **options):
    """A run of three rounds that chose in its second and third."""
    metrics_by_round = ({}, {"tune.epochs": 1.0, "tune.lr": 0.1}, {"tune.epochs": epochs, "tune.lr": lr})
    run = RunRecord(
        path=Path("r"),
        config={"set": {"personalise": {"search": True, **options}}},
        about={},
        partition={},
        rounds=tuple({"round": i, "metrics": metrics} for i, metrics in enumerate(metrics_by_round)),
        clients=(),
        result={},
        accuracy_key="central",
        joules_scope="clients",
    )
    return StudyRun(Entry("here", variant, seed, Job(seed=seed)), run, {}, 1, 50)


GRID = {"lr_grid": "0.005,0.02,0.1", "epochs_grid": "1,5,20"}


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (tuned(**GRID), TuningChoice(5, 0.02, ())),
        (tuned(20.0, 0.005, **GRID), TuningChoice(20, 0.005, ("epochs 20", "lr 0.005"))),
        (tuned(1.0, 0.1, **GRID), TuningChoice(1, 0.1, ("epochs 1", "lr 0.1"))),
        (
            tuned(0.0, 0.02, lr_grid="0.005,0.02,0.1", epochs_grid="0,1"),
            TuningChoice(0, 0.02, ()),
        ),  # no grid goes below 0 epochs
        (tuned(10.0, 0.03), TuningChoice(10, 0.03, ("epochs 10",))),  # of the default grid
    ],
)
def test_the_last_choice_counts(run, found):
    assert tuning_choice(run) == found


class InMemoryRuns(StudyRuns):
    """Runs that are not on a disk."""

    def __init__(self, *runs):
        self.run_by_key = {(m.entry.cell, m.entry.variant, m.entry.seed): m for m in runs}
        self.entries = [m.entry for m in runs]


def test_a_row_for_each_variant_that_tuned():
    runs = [tuned(20.0, seed=0, **GRID), tuned(20.0, seed=1, **GRID), tuned(5.0, 0.1, seed=2, **GRID)]
    table = tuning_table(InMemoryRuns(*runs, tuned(variant="b", **GRID)))
    assert table.rows == (
        ("here", "a", "20, 20, 5", "0.02, 0.02, 0.1", "epochs 20 with 2 of 3; lr 0.1 with 1 of 3"),
        ("here", "b", "5", "0.02", ""),
    )
