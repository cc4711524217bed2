"""What tuned fine-tuning chose from its grid, and where it might have chosen more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.methods.composition.tuning import PERSONALISE, Tuning
from shoal.report.table import Sheet
from shoal.study.measurements import Measured, Runs

NOTE = (
    "One number per seed. At an edge of the grid a wider one might do better, and what is compared with it look worse."
)


@dataclass(frozen=True)
class Chosen:
    passes: int
    step: float
    edges: tuple[str, ...]  # what of both is the least or the most that could be chosen


def chosen(m: Measured) -> Chosen | None:
    """At the last evaluation; None where nothing was tuned."""
    passes, step = m.last("tune.epochs"), m.last("tune.lr")
    if passes is None or step is None:
        return None
    said = {k: v for k, v in m.run.config.get("set", {}).get(PERSONALISE, {}).items() if k in ("rates", "passes")}
    grid = Tuning(**said)
    few = grid.numbers_of_epochs[:1] if grid.numbers_of_epochs[0] else ()  # fewer than none there are not
    at = {
        f"passes {passes:g}": passes in (*few, grid.numbers_of_epochs[-1]),
        f"step {step:g}": step in (grid.learning_rates[0], grid.learning_rates[-1]),
    }
    return Chosen(int(passes), step, tuple(name for name, edge in at.items() if edge))


def tuning_sheet(runs: Runs) -> Sheet:
    """A line for each variant of a cell that tuned anything."""
    found = [(cell, variant, _of(runs, cell, variant)) for cell in runs.cells for variant in runs.variants(cell)]
    rows = [
        (cell, variant, _each([c.passes for c in seeds]), _each([c.step for c in seeds]), _warning(seeds))
        for cell, variant, seeds in found
        if seeds
    ]
    return Sheet("What tuning chose", ("Cell", "variant", "passes", "step", "at an edge"), tuple(rows), notes=(NOTE,))


def _of(runs: Runs, cell: str, variant: str) -> list[Chosen]:
    return [c for c in map(chosen, runs.of(cell, variant)) if c is not None]


def _each(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def _warning(seeds: Sequence[Chosen]) -> str:
    edges = [edge for c in seeds for edge in c.edges]
    return "; ".join(f"{edge} with {edges.count(edge)} of {len(seeds)}" for edge in dict.fromkeys(edges))
