"""Metrics of the runs of a study, and confidence intervals over seeds or clients."""

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
ACCURACY_KEYS = ("local", "worst10", "central")  # of a study and of result.json


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval. `low` and `high` are None if there is no interval."""

    mean: float
    low: float | None
    high: float | None
    basis: str
    values: tuple[float, ...] = ()  # one value per seed
    is_lower_bound: bool = False  # True if some values are only lower bounds


def interval_over_seeds(values: Sequence[float]) -> Interval:
    """Returns Student's t interval of one value per seed: mean ± t s / √n."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, "one seed", tuple(values))
    half_width = float(stats.t.ppf((1 + CONFIDENCE_LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Interval(mean, mean - half_width, mean + half_width, f"t, {len(values)} seeds", tuple(values))


def interval_over_clients(values: Sequence[float]) -> Interval:
    """Returns the bootstrap interval of one value per client. It holds for such clients, not for other seeds."""
    means = np.random.default_rng(0).choice(np.asarray(values), (NUM_BOOTSTRAP_DRAWS, len(values))).mean(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
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
        """Returns a metric of the run, or None if the run does not have it. Accuracies are in percent."""
        result = self.record.result or {}
        if name in ACCURACY_KEYS:
            return _to_percent(result["accuracy"].get(name))
        if name.startswith("unseen"):
            return _to_percent(self._unseen_result(name).get("accuracy"))
        match name:
            case "epochs_to_target":
                return self.cost_to_target().get("epochs")
            case "joules_to_target":
                return self.cost_to_target().get("joules")
            case "clusters_ari":
                return result.get("clusters_ari")
            case "has_split":
                num_clusters = self.last_value("probe.num_clusters")
                return None if num_clusters is None else float(num_clusters > 1)
        raise KeyError(name)

    def metric_by_client(self, name: str) -> dict[str, float]:
        """Returns the values of a metric that is a mean over clients, by client. Other metrics have none."""
        if name.startswith("unseen"):
            return {c: 100 * x for c, x in self._unseen_result(name).get("accuracy_by_client", {}).items()}
        if name != "local" or not self.record.clients:
            return {}
        accuracy = zip(self.record.partition["clients"], self.record.clients[-1]["accuracy"], strict=True)
        return {c: 100 * x for c, x in accuracy if x is not None}

    def cost_to_target(self) -> dict[str, float]:
        """Returns the client-epochs of training and the clients' joules until the target, or nothing without one."""
        target = self.entry.target_accuracy
        cost = None if target is None else cost_to_accuracy(self.record, target, self.sustained_rounds)
        return self.cost_up_to(cost.round, cost.joules) if cost else {}

    def cost_up_to(self, round_number: int, joules: float) -> dict[str, float]:
        """Returns the client-epochs of training up to a round, and these joules."""
        epochs = self.record.settings.get("train.epochs", self.record.config["epochs"])
        num_updates = sum(line["cohort_size"] for line in self.record.rounds if line["round"] <= round_number)
        return {"epochs": float(epochs * num_updates), "joules": joules}

    def total_cost(self) -> dict[str, float]:
        """Returns the client-epochs and joules of the whole run."""
        joules = (self.record.result or {})["client_joules"]
        return self.cost_up_to(
            self.record.completed_rounds, sum(x for x in joules.values() if isinstance(x, float | int))
        )

    def last_value(self, metric: str) -> float | None:
        """Returns the value in the last round that has this metric, or None."""
        values = [line["metrics"][metric] for line in self.record.rounds if metric in line.get("metrics", {})]
        return values[-1] if values else None

    def _unseen_result(self, name: str) -> Mapping[str, Any]:
        """Returns the result of unseen clients: `unseen.20` with 20 inputs, `unseen.none` without inputs.

        `unseen` uses the number of inputs that tables show, or no inputs if the method infers nothing from inputs.
        """
        _, _, way = name.partition(".")
        result: Mapping[str, Any] = self.unseen_results.get(way or str(self.shown_num_inputs), {})
        return result or (self.unseen_results.get("none", {}) if not way else {})


def _to_percent(x: float | None) -> float | None:
    return None if x is None else 100 * x


class StudyRuns:
    """All finished runs of a budget, and the reasons why other runs failed."""

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
        """The entries that are not finished."""
        return [e for e in self.entries if self.run_by_key[e.cell, e.variant, e.seed] is None]

    def failed_seeds(self, cell: str, *variants: str | None) -> set[int]:
        """Returns the seeds with which a run of one of these variants failed."""
        return {seed for (c, variant, seed) in self.failures if c == cell and variant in variants}

    @property
    def cells(self) -> list[str]:
        """The names of the cells, in the order of the study."""
        return list(dict.fromkeys(e.cell for e in self.entries))

    def target_accuracy(self, cell: str) -> float | None:
        """Returns the central accuracy to reach in a cell, or None."""
        return next((e.target_accuracy for e in self.entries if e.cell == cell and e.target_accuracy is not None), None)

    def variants(self, cell: str) -> list[str]:
        """Returns the variants that run in a cell, in the order of the study."""
        return list(dict.fromkeys(e.variant for e in self.entries if e.cell == cell))

    def of_variant(self, cell: str, variant: str) -> list[StudyRun]:
        """Returns the finished runs of a variant in a cell, one per seed."""
        return [m for (c, v, _), m in self.run_by_key.items() if m is not None and (c, v) == (cell, variant)]

    def pairs(self, cell: str, variant: str, baseline: str) -> list[tuple[StudyRun, StudyRun]]:
        """Returns the pairs of runs with the same seed, which have the same clients."""
        baselines = {run.entry.seed: run for run in self.of_variant(cell, baseline)}
        runs = self.of_variant(cell, variant)
        return [(run, baselines[run.entry.seed]) for run in runs if run.entry.seed in baselines]

    def difference(
        self, cell: str, variant: str, baseline: str, metric: str, baseline_metric: str | None = None
    ) -> Interval | None:
        """Returns the metric of `variant` minus that of `baseline`, paired by seed, or by client for a single seed."""
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
