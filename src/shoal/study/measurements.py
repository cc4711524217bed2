"""What runs measured, one number each, and how sure a number over seeds or clients is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from shoal.report.cost_curves import to_accuracy
from shoal.store.reader import RunRecord, read_failure, read_run
from shoal.study.plan import Entry, Study
from shoal.study.runner import UNSEEN, finished

LEVEL = 0.95
DRAWS = 10_000
ACCURACIES = {"local": "mean", "worst10": "worst10", "central": "central"}  # of a run, and what result.json calls them


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with 95 % confidence; None where nothing is known of that."""

    mean: float
    low: float | None
    high: float | None
    how: str
    values: tuple[float, ...] = ()  # of each seed
    bound: bool = False  # of some seed only known to be as large at least


def over_seeds(values: Sequence[float]) -> Interval:
    """Student's t of the seeds' numbers: mean ± t s / √n."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, "one seed", tuple(values))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half, f"t, {len(values)} seeds", tuple(values))


def over_clients(values: Sequence[float]) -> Interval:
    """Percentiles of means of clients drawn anew, as many as there are: of these clients' like, not of other seeds."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, len(values))).mean(1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = fmean(values)
    return Interval(mean, float(low), float(high), f"bootstrap, {len(values)} clients of one seed", (mean,))


@dataclass(frozen=True)
class Measured:
    """A finished run of a study."""

    entry: Entry
    run: RunRecord
    unseen: Mapping[str, Any]
    held: int
    shown_inputs: int

    def figure(self, name: str) -> float | None:
        """Accuracies in percent."""
        result = self.run.result or {}
        if name in ACCURACIES:
            return _percent(result["accuracy"].get(ACCURACIES[name]))
        if name.startswith("unseen"):
            return _percent(self._served(name).get("mean"))
        match name:
            case "epochs_to":
                return self.spent_to_target().get("epochs")
            case "joules_to":
                return self.spent_to_target().get("joules")
            case "ari":
                return result.get("groups_ari")
            case "split":
                groups = self.last("probe.groups")
                return None if groups is None else float(groups > 1)
        raise KeyError(name)

    def of_clients(self, name: str) -> dict[str, float]:
        """The same of every client, where it is a mean over clients; else nothing."""
        if name.startswith("unseen"):
            return {c: 100 * x for c, x in self._served(name).get("clients", {}).items()}
        if name != "local" or not self.run.clients:
            return {}
        accuracy = zip(self.run.partition["clients"], self.run.clients[-1]["accuracy"], strict=True)
        return {c: 100 * x for c, x in accuracy if x is not None}

    def spent_to_target(self) -> dict[str, float]:
        """Client-epochs of training, and joules of clients for everything; nothing where it was never reached."""
        target = self.entry.target
        reached = None if target is None else to_accuracy(self.run, target, self.held)
        return self.spent(reached.round, reached.joules) if reached else {}

    def spent(self, round: int, joules: float) -> dict[str, float]:
        epochs = self.run.settings.get("train.epochs", self.run.config["epochs"])
        trained = sum(line["cohort"] for line in self.run.rounds if line["round"] <= round)
        return {"epochs": float(epochs * trained), "joules": joules}

    def spent_in_all(self) -> dict[str, float]:
        joules = (self.run.result or {})["joules_of_clients"]
        return self.spent(self.run.completed_rounds, sum(x for x in joules.values() if isinstance(x, float | int)))

    def last(self, metric: str) -> float | None:
        """As the last round that told it did."""
        known = [line["metrics"][metric] for line in self.run.rounds if metric in line.get("metrics", {})]
        return known[-1] if known else None

    def _served(self, name: str) -> Mapping[str, Any]:
        """`unseen` alone: by so many inputs as tables show, by those who can; else as anybody."""
        _, _, how = name.partition(".")
        found: Mapping[str, Any] = self.unseen.get(how or str(self.shown_inputs), {})
        return found or (self.unseen.get("none", {}) if not how else {})


def _percent(x: float | None) -> float | None:
    return None if x is None else 100 * x


class Runs:
    """All finished runs of a study's budget, and why others failed."""

    def __init__(self, study: Study, entries: Sequence[Entry], out: Path) -> None:
        self.study, self.entries = study, entries
        self.found = {(e.cell, e.variant, e.seed): self._read(e, out / e.place) for e in entries}
        reasons = {(e.cell, e.variant, e.seed): read_failure(out / e.place).get("reason") for e in self.missing}
        self.failures = {run: reason for run, reason in reasons.items() if reason}

    def _read(self, entry: Entry, place: Path) -> Measured | None:
        if not finished(place, entry.job):
            return None
        unseen = json.loads((place / UNSEEN).read_text()) if entry.job.unseen else {}
        run = read_run(place, accuracy_key="central", joules_scope="clients")
        return Measured(entry, run, unseen, self.study.held, self.study.shown_inputs)

    @property
    def missing(self) -> list[Entry]:
        return [e for e in self.entries if self.found[e.cell, e.variant, e.seed] is None]

    def failed_seeds(self, cell: str, *variants: str | None) -> set[int]:
        """Those for which a run of any of these variants failed."""
        return {seed for (c, variant, seed) in self.failures if c == cell and variant in variants}

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(e.cell for e in self.entries))

    def target(self, cell: str) -> float | None:
        return next((e.target for e in self.entries if e.cell == cell and e.target is not None), None)

    def variants(self, cell: str) -> list[str]:
        return list(dict.fromkeys(e.variant for e in self.entries if e.cell == cell))

    def of(self, cell: str, variant: str) -> list[Measured]:
        """One per seed."""
        return [m for (c, v, _), m in self.found.items() if m is not None and (c, v) == (cell, variant)]

    def pairs(self, cell: str, of: str, than: str) -> list[tuple[Measured, Measured]]:
        """Both of the same seed, and so on the same clients."""
        other = {m.entry.seed: m for m in self.of(cell, than)}
        return [(m, other[m.entry.seed]) for m in self.of(cell, of) if m.entry.seed in other]

    def difference(self, cell: str, of: str, than: str, figure: str, than_figure: str | None = None) -> Interval | None:
        """What one has more than the other, paired by seed; by client where there is one seed."""
        told = than_figure or figure
        pairs = self.pairs(cell, of, than)
        both = [(a.figure(figure), b.figure(told)) for a, b in pairs]
        values = [a - b for a, b in both if a is not None and b is not None]
        if len(values) == 1:
            mine, theirs = next((a, b) for (a, b), x in zip(pairs, both, strict=True) if None not in x)
            ours, other = mine.of_clients(figure), theirs.of_clients(told)
            if shared := sorted(ours.keys() & other.keys()):
                return over_clients([ours[c] - other[c] for c in shared])
        return over_seeds(values) if values else None
