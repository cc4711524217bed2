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

from shoal.report.cost_curves import cost_to_accuracy
from shoal.store.reader import RunRecord, read_failure, read_run
from shoal.study.plan import Entry, Study
from shoal.study.runner import UNSEEN_FILE, is_finished

CONFIDENCE_LEVEL = 0.95
NUM_BOOTSTRAP_DRAWS = 10_000
ACCURACY_KEYS = {
    "local": "mean",
    "worst10": "worst10",
    "central": "central",
}  # of a run, and what result.json calls them


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with 95 % confidence; None where nothing is known of that."""

    mean: float
    low: float | None
    high: float | None
    basis: str
    values: tuple[float, ...] = ()  # of each seed
    is_lower_bound: bool = False  # of some seed only known to be as large at least


def interval_over_seeds(values: Sequence[float]) -> Interval:
    """Student's t of the seeds' numbers: mean ± t s / √n."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, "one seed", tuple(values))
    half = float(stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half, mean + half, f"t, {len(values)} seeds", tuple(values))


def interval_over_clients(values: Sequence[float]) -> Interval:
    """Percentiles of means of clients drawn anew, as many as there are: of these clients' like, not of other seeds."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (NUM_BOOTSTRAP_DRAWS, len(values))).mean(1)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    mean = fmean(values)
    return Interval(mean, float(low), float(high), f"bootstrap, {len(values)} clients of one seed", (mean,))


@dataclass(frozen=True)
class StudyRun:
    """A finished run of a study."""

    entry: Entry
    record: RunRecord
    unseen_results: Mapping[str, Any]
    sustained_rounds: int
    shown_num_inputs: int

    def metric(self, name: str) -> float | None:
        """Accuracies in percent."""
        result = self.record.result or {}
        if name in ACCURACY_KEYS:
            return _to_percent(result["accuracy"].get(ACCURACY_KEYS[name]))
        if name.startswith("unseen"):
            return _to_percent(self._unseen_result(name).get("mean"))
        match name:
            case "epochs_to":
                return self.cost_to_target().get("epochs")
            case "joules_to":
                return self.cost_to_target().get("joules")
            case "ari":
                return result.get("groups_ari")
            case "split":
                groups = self.last_value("probe.groups")
                return None if groups is None else float(groups > 1)
        raise KeyError(name)

    def metric_by_client(self, name: str) -> dict[str, float]:
        """The same of every client, where it is a mean over clients; else nothing."""
        if name.startswith("unseen"):
            return {c: 100 * x for c, x in self._unseen_result(name).get("clients", {}).items()}
        if name != "local" or not self.record.clients:
            return {}
        accuracy = zip(self.record.partition["clients"], self.record.clients[-1]["accuracy"], strict=True)
        return {c: 100 * x for c, x in accuracy if x is not None}

    def cost_to_target(self) -> dict[str, float]:
        """Client-epochs of training, and joules of clients for everything; nothing where it was never reached."""
        target = self.entry.target_accuracy
        reached = None if target is None else cost_to_accuracy(self.record, target, self.sustained_rounds)
        return self.cost_up_to(reached.round, reached.joules) if reached else {}

    def cost_up_to(self, round_number: int, joules: float) -> dict[str, float]:
        epochs = self.record.settings.get("train.epochs", self.record.config["epochs"])
        trained = sum(line["cohort"] for line in self.record.rounds if line["round"] <= round_number)
        return {"epochs": float(epochs * trained), "joules": joules}

    def total_cost(self) -> dict[str, float]:
        joules = (self.record.result or {})["joules_of_clients"]
        return self.cost_up_to(
            self.record.completed_rounds, sum(x for x in joules.values() if isinstance(x, float | int))
        )

    def last_value(self, metric: str) -> float | None:
        """As the last round that told it did."""
        known = [line["metrics"][metric] for line in self.record.rounds if metric in line.get("metrics", {})]
        return known[-1] if known else None

    def _unseen_result(self, name: str) -> Mapping[str, Any]:
        """`unseen` alone: by so many inputs as tables show, by those who can; else as anybody."""
        _, _, how = name.partition(".")
        found: Mapping[str, Any] = self.unseen_results.get(how or str(self.shown_num_inputs), {})
        return found or (self.unseen_results.get("none", {}) if not how else {})


def _to_percent(x: float | None) -> float | None:
    return None if x is None else 100 * x


class StudyRuns:
    """All finished runs of a study's budget, and why others failed."""

    def __init__(self, study: Study, entries: Sequence[Entry], out: Path) -> None:
        self.study, self.entries = study, entries
        self.run_by_key = {(e.cell, e.variant, e.seed): self._read(e, out / e.relative_path) for e in entries}
        reasons = {(e.cell, e.variant, e.seed): read_failure(out / e.relative_path).get("reason") for e in self.missing}
        self.failures = {run: reason for run, reason in reasons.items() if reason}

    def _read(self, entry: Entry, path: Path) -> StudyRun | None:
        if not is_finished(path, entry.job):
            return None
        unseen = json.loads((path / UNSEEN_FILE).read_text()) if entry.job.unseen else {}
        run = read_run(path, accuracy_key="central", joules_scope="clients")
        return StudyRun(entry, run, unseen, self.study.sustained_rounds, self.study.shown_num_inputs)

    @property
    def missing(self) -> list[Entry]:
        return [e for e in self.entries if self.run_by_key[e.cell, e.variant, e.seed] is None]

    def failed_seeds(self, cell: str, *variants: str | None) -> set[int]:
        """Those for which a run of any of these variants failed."""
        return {seed for (c, variant, seed) in self.failures if c == cell and variant in variants}

    @property
    def cells(self) -> list[str]:
        return list(dict.fromkeys(e.cell for e in self.entries))

    def target_accuracy(self, cell: str) -> float | None:
        return next((e.target_accuracy for e in self.entries if e.cell == cell and e.target_accuracy is not None), None)

    def variants(self, cell: str) -> list[str]:
        return list(dict.fromkeys(e.variant for e in self.entries if e.cell == cell))

    def of_variant(self, cell: str, variant: str) -> list[StudyRun]:
        """One per seed."""
        return [m for (c, v, _), m in self.run_by_key.items() if m is not None and (c, v) == (cell, variant)]

    def pairs(self, cell: str, variant: str, baseline: str) -> list[tuple[StudyRun, StudyRun]]:
        """Both of the same seed, and so on the same clients."""
        other = {m.entry.seed: m for m in self.of_variant(cell, baseline)}
        return [(m, other[m.entry.seed]) for m in self.of_variant(cell, variant) if m.entry.seed in other]

    def difference(
        self, cell: str, variant: str, baseline: str, metric: str, baseline_metric: str | None = None
    ) -> Interval | None:
        """What one has more than the other, paired by seed; by client where there is one seed."""
        other_metric = baseline_metric or metric
        pairs = self.pairs(cell, variant, baseline)
        both = [(a.metric(metric), b.metric(other_metric)) for a, b in pairs]
        values = [a - b for a, b in both if a is not None and b is not None]
        if len(values) == 1:
            our_run, other_run = next((a, b) for (a, b), x in zip(pairs, both, strict=True) if None not in x)
            our_values, other_values = our_run.metric_by_client(metric), other_run.metric_by_client(other_metric)
            if shared := sorted(our_values.keys() & other_values.keys()):
                return interval_over_clients([our_values[c] - other_values[c] for c in shared])
        return interval_over_seeds(values) if values else None
