"""What tuned fine-tuning chose from its grid, and where it might have chosen more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.methods.composition.tuning import PERSONALISE, Tuning
from shoal.report.table import ReportTable
from shoal.study.measurements import StudyRun, StudyRuns

NOTE = (
    "One number per seed. At an edge of the grid a wider one might do better, and what is compared with it look worse."
)


@dataclass(frozen=True)
class TuningChoice:
    epochs: int
    lr: float
    at_grid_edge: tuple[str, ...]  # what of both is the least or the most that could be chosen


def tuning_choice(run: StudyRun) -> TuningChoice | None:
    """At the last evaluation; None where nothing was tuned."""
    passes, step = run.last_value("tune.epochs"), run.last_value("tune.lr")
    if passes is None or step is None:
        return None
    grid_options = {
        k: v for k, v in run.record.config.get("set", {}).get(PERSONALISE, {}).items() if k in ("rates", "passes")
    }
    grid = Tuning(**grid_options)
    few = grid.numbers_of_epochs[:1] if grid.numbers_of_epochs[0] else ()  # fewer than none there are not
    at = {
        f"passes {passes:g}": passes in (*few, grid.numbers_of_epochs[-1]),
        f"step {step:g}": step in (grid.learning_rates[0], grid.learning_rates[-1]),
    }
    return TuningChoice(int(passes), step, tuple(name for name, edge in at.items() if edge))


def tuning_table(runs: StudyRuns) -> ReportTable:
    """A line for each variant of a cell that tuned anything."""
    found = [
        (cell, variant, _choices_of(runs, cell, variant)) for cell in runs.cells for variant in runs.variants(cell)
    ]
    rows = [
        (cell, variant, _joined([c.epochs for c in seeds]), _joined([c.lr for c in seeds]), _edge_warning(seeds))
        for cell, variant, seeds in found
        if seeds
    ]
    return ReportTable(
        "What tuning chose", ("Cell", "variant", "passes", "step", "at an edge"), tuple(rows), notes=(NOTE,)
    )


def _choices_of(runs: StudyRuns, cell: str, variant: str) -> list[TuningChoice]:
    return [c for c in map(tuning_choice, runs.of_variant(cell, variant)) if c is not None]


def _joined(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def _edge_warning(seeds: Sequence[TuningChoice]) -> str:
    edges = [edge for c in seeds for edge in c.at_grid_edge]
    return "; ".join(f"{edge} with {edges.count(edge)} of {len(seeds)}" for edge in dict.fromkeys(edges))
