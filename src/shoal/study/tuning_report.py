"""The choices of tuned fine-tuning, and whether they are at an edge of its grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.methods.composition.tuning import PERSONALISE, Tuning
from shoal.report.table import ReportTable
from shoal.study.measurements import StudyRun, StudyRuns

NOTE = "One number per seed. If a choice is at an edge of the grid, a wider grid might give a higher accuracy."


@dataclass(frozen=True)
class TuningChoice:
    """The number of epochs and the learning rate that tuning chose in one run."""

    epochs: int
    lr: float
    at_grid_edge: tuple[str, ...]  # the choices that are the lowest or the highest of the grid


def tuning_choice(run: StudyRun) -> TuningChoice | None:
    """Returns the choice of the last evaluation, or None if nothing was tuned."""
    epochs, lr = run.last_value("tune.epochs"), run.last_value("tune.lr")
    if epochs is None or lr is None:
        return None
    grid_options = {
        k: v
        for k, v in run.record.config.get("set", {}).get(PERSONALISE, {}).items()
        if k in ("lr_grid", "epochs_grid")
    }
    grid = Tuning(**grid_options)
    lowest = grid.numbers_of_epochs[:1] if grid.numbers_of_epochs[0] else ()  # no grid goes below 0 epochs
    is_at_edge = {
        f"epochs {epochs:g}": epochs in (*lowest, grid.numbers_of_epochs[-1]),
        f"lr {lr:g}": lr in (grid.learning_rates[0], grid.learning_rates[-1]),
    }
    return TuningChoice(int(epochs), lr, tuple(name for name, is_edge in is_at_edge.items() if is_edge))


def tuning_table(runs: StudyRuns) -> ReportTable:
    """Returns a table with a row for each variant of a cell that tuned anything."""
    choices = [
        (cell, variant, _choices_of(runs, cell, variant)) for cell in runs.cells for variant in runs.variants(cell)
    ]
    rows = [
        (cell, variant, _joined([c.epochs for c in seeds]), _joined([c.lr for c in seeds]), _edge_warning(seeds))
        for cell, variant, seeds in choices
        if seeds
    ]
    return ReportTable(
        "What tuning chose", ("Cell", "variant", "epochs", "lr", "at an edge"), tuple(rows), notes=(NOTE,)
    )


def _choices_of(runs: StudyRuns, cell: str, variant: str) -> list[TuningChoice]:
    return [c for c in map(tuning_choice, runs.of_variant(cell, variant)) if c is not None]


def _joined(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def _edge_warning(seeds: Sequence[TuningChoice]) -> str:
    edges = [edge for c in seeds for edge in c.at_grid_edge]
    return "; ".join(f"{edge} with {edges.count(edge)} of {len(seeds)}" for edge in dict.fromkeys(edges))
