"""What tuned fine-tuning chose, with a word where the grid ended there."""

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
    said = ({}, {"tune.epochs": 1.0, "tune.lr": 0.1}, {"tune.epochs": epochs, "tune.lr": lr})
    run = RunRecord(
        path=Path("r"),
        config={"set": {"personalise": {"tune": True, **options}}},
        about={},
        partition={},
        rounds=tuple({"round": i, "metrics": metrics} for i, metrics in enumerate(said)),
        clients=(),
        result={},
        accuracy_key="central",
        joules_scope="clients",
    )
    return StudyRun(Entry("here", variant, seed, Job(seed=seed)), run, {}, 1, 50)


GRID = {"rates": "0.005,0.02,0.1", "passes": "1,5,20"}


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (tuned(**GRID), TuningChoice(5, 0.02, ())),
        (tuned(20.0, 0.005, **GRID), TuningChoice(20, 0.005, ("passes 20", "step 0.005"))),
        (tuned(1.0, 0.1, **GRID), TuningChoice(1, 0.1, ("passes 1", "step 0.1"))),
        (tuned(0.0, 0.02, rates="0.005,0.02,0.1", passes="0,1"), TuningChoice(0, 0.02, ())),  # nothing is below none
        (tuned(10.0, 0.03), TuningChoice(10, 0.03, ("passes 10",))),  # of the grid that is taken where none is given
    ],
)
def test_what_was_chosen_last(run, found):
    assert tuning_choice(run) == found


class Known(StudyRuns):
    """Runs that were never on a disk."""

    def __init__(self, *found):
        self.run_by_key = {(m.entry.cell, m.entry.variant, m.entry.seed): m for m in found}
        self.entries = [m.entry for m in found]


def test_a_line_for_each_variant_that_tuned():
    runs = [tuned(20.0, seed=0, **GRID), tuned(20.0, seed=1, **GRID), tuned(5.0, 0.1, seed=2, **GRID)]
    sheet = tuning_table(Known(*runs, tuned(variant="b", **GRID)))
    assert sheet.rows == (
        ("here", "a", "20, 20, 5", "0.02, 0.02, 0.1", "passes 20 with 2 of 3; step 0.1 with 1 of 3"),
        ("here", "b", "5", "0.02", ""),
    )
