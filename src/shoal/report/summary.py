"""The numbers of a run as one row, the mean of such rows over seeds, and the columns that show both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.filesize import decimal

from shoal.report.cost_curves import JOULE_PARTS, cost_curve, has_joules
from shoal.store.reader import RunRecord, differing_settings, run_labels, runs_by_job

ACCURACY = ("mean", "std", "worst10", "f1", "central")
LOSS = ("mean", "central")
JOULES = (*JOULE_PARTS, "total")
COMPARABILITY_KEYS = ("data", "partition", "clients")
SI_PREFIXES = {-2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G"}


def percent_text(x: float) -> str:
    return f"{100 * x:.1f}"


def size_text(x: float) -> str:
    return decimal(round(x))


def joules_text(x: float) -> str:
    """Three digits: 3.85 kJ."""
    digits, power = f"{x:.2e}".split("e")
    thousands = min(max(int(power) // 3, min(SI_PREFIXES)), max(SI_PREFIXES))
    places = int(power) - 3 * thousands
    if not float(digits):
        return "0 J"
    return f"{float(digits) * 10.0**places:,.{max(0, 2 - places)}f} {SI_PREFIXES[thousands]}J"


def joules_unit(largest: float) -> tuple[float, str]:
    """The factor and the name of the unit for an axis that goes so far: (1000.0, "kJ")."""
    thousands = max((t for t in SI_PREFIXES if 1000.0**t <= largest), default=0)
    return 1000.0**thousands, f"{SI_PREFIXES[thousands]}J"


def duration_text(seconds: float) -> str:
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:#.3g}".rstrip(".") + " ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest_s:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


@dataclass(frozen=True)
class Column:
    title: str
    path: tuple[str, ...]
    choose_best: Callable[[Sequence[float]], float] | None  # None: nothing that a run is better for
    show: Callable[[float], str]
    meaning: str
    is_optional: bool = False  # left out where no run has it
    requires: str = ""  # left out where no run has this

    def value(self, row: Mapping[str, Any]) -> Any:
        return _value_at(row, self.path)

    def text(self, row: Mapping[str, Any]) -> str:
        """A number; in a row over seeds the mean, and its spread on a second line."""
        value = self.value(row)
        if value is None:
            return "–"
        if isinstance(value, Mapping):
            spread = self.show(value["std"]) if value["std"] else "0"
            return f"{self.show(value['mean'])}\n± {spread}"
        return self.show(value)


COLUMNS = (
    Column("Mean %", ("accuracy", "mean"), max, percent_text, "local test accuracy, mean over clients"),
    Column("Std %", ("accuracy", "std"), min, percent_text, "its standard deviation across clients"),
    Column("Worst 10 %", ("accuracy", "worst10"), max, percent_text, "its mean over the worst tenth of clients"),
    Column("F1 %", ("accuracy", "f1"), max, percent_text, "macro F1, mean over clients"),
    Column("Central %", ("accuracy", "central"), max, percent_text, "accuracy on the central test set"),
    Column("Loss", ("loss", "mean"), min, "{:.3f}".format, "local test loss, mean over clients"),
    Column("Groups", ("groups",), None, "{:.3g}".format, "groups of clients that share a model", True),
    Column("Up", ("bytes_up",), min, size_text, "bytes from the clients to the server, whole run"),
    Column("Down", ("bytes_down",), min, size_text, "bytes from the server to the clients, whole run"),
    Column(
        "Long link",
        ("bytes_long",),
        min,
        size_text,
        "bytes to and from the cloud, whole run: of the edges, or of all clients where there are none",
        requires="edges",
    ),
    Column(
        "Joules",
        ("joules", "total"),
        min,
        joules_text,
        "of all clients, and of the server unless it is left out, whole run",
        True,
    ),
    Column("Sim time", ("sim_time_s",), min, duration_text, "time of the run on the clients’ devices and links", True),
    Column("Predict", ("predict_ms",), None, "{:.2f} ms".format, "time to answer 32 rows, on one thread", True),
    Column("Time", ("wall_s",), None, duration_text, "wall time of the run, on a machine that may have been busy"),
)


def summarise(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One row per run. An unfinished run gives its last evaluated round and its traffic so far."""
    return [_run_row(r, name) for r, name in zip(records, run_labels(records), strict=True)]


def summarise_seeds(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One row per job that finished with two seeds or more; each number becomes {"mean", "std"} over seeds.

    The deviation is the sample's (n − 1). A job that was run twice with one seed counts once.
    """
    groups = [(name, runs) for name, runs in runs_by_job(records) if len(runs) > 1 and runs[0].is_finished]
    return [_seeds_row(runs, name) for name, runs in groups]


def shown_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    def has(column: Column, row: Mapping[str, Any]) -> bool:
        return (
            bool(row[column.requires]) if column.requires else not column.is_optional or column.value(row) is not None
        )

    return [c for c in COLUMNS if any(has(c, row) for row in rows)]


def best_rows(rows: Sequence[Mapping[str, Any]], column: Column) -> set[int]:
    """Which finished rows hold the column's best number; none where there is nothing to choose from."""
    values: dict[int, float] = {}
    for i, row in enumerate(rows):
        value = column.value(row)
        if value is not None and row["finished"]:
            values[i] = value["mean"] if isinstance(value, Mapping) else value
    if column.choose_best is None or len(set(values.values())) < 2:
        return set()
    best = column.choose_best(list(values.values()))
    return {i for i, value in values.items() if value == best}


def comparability_warning(records: Sequence[RunRecord]) -> str:
    """A sentence for runs whose numbers do not measure the same thing, else nothing."""
    if unlike := [k for k in differing_settings(records) if k in COMPARABILITY_KEYS]:
        return f"These runs differ in {', '.join(unlike)}: their numbers are not directly comparable."
    return ""


def run_remarks(records: Sequence[RunRecord]) -> list[str]:
    """What a number of the table does not say: a run that ended early, reports and clients that were missing, what the
    method says of itself. Failed runs have no numbers."""
    run_notes, notes = [], dict[str, list[str]]()
    for name, run in [(n, r) for n, r in zip(run_labels(records), records, strict=True) if r.failure is None]:
        num_late_reports = sum(line.get("late", 0) for line in run.rounds)
        num_depleted_clients = sum(len(line.get("left", ())) for line in run.rounds)
        missing = [f"{_count_text(num_late_reports, 'report')} came after the deadline"] if num_late_reports else []
        missing += (
            [f"{_count_text(num_depleted_clients, 'client')} left with an empty battery"]
            if num_depleted_clients
            else []
        )
        missing_text = [f"{', '.join(missing)} (rounds.jsonl says who and when)"] if missing else []
        status = [run.status] if run.status != "finished" else []
        run_notes += [f"{name}: {'; '.join((*status, *missing_text))}."] if status or missing_text else []
        for note in (run.result or {}).get("notes", ()):
            notes.setdefault(note, []).append(name)
    return run_notes + [f"{_first_and_others(names)}: {note}." for note, names in notes.items()]


def _first_and_others(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {_count_text(len(names) - 1, 'other')}"


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _run_row(record: RunRecord, label: str) -> dict[str, Any]:
    result = record.result or {}
    last = record.evaluated_rounds[-1] if record.evaluated_rounds else {}
    accuracy = result.get("accuracy") or last.get("accuracy") or {}
    loss = result.get("loss") or last.get("loss") or {}
    traffic = {k: result.get(k, sum(line[k] for line in record.rounds)) for k in ("bytes_up", "bytes_down")}
    edge_cloud_bytes = [line["bytes_long"] for line in record.rounds if "bytes_long" in line]
    return {
        "run_dir": str(record.path),
        "label": label,
        "method": record.config["method"],
        "seed": record.config["seed"],
        "finished": record.is_finished,
        "status": record.status,
        "failure": record.failure,
        "rounds": record.completed_rounds,
        "accuracy": {k: _finite_or_none(accuracy.get(k)) for k in ACCURACY},
        "loss": {k: _finite_or_none(loss.get(k)) for k in LOSS},
        "groups": sum(1 for group in result["groups"] if group["clients"]) if "groups" in result else None,
        **traffic,
        "edges": len(result["edges"]) if "edges" in result else int(bool(edge_cloud_bytes)),
        "bytes_long": sum(edge_cloud_bytes) if edge_cloud_bytes else sum(traffic.values()),
        "joules": _joules(record),
        "sim_time_s": _sim_time_s(record),
        "predict_ms": _finite_or_none(result.get("predict_ms")),
        "wall_s": _finite_or_none(result.get("wall_s", sum(line["wall_s"] for line in record.timing))),
    }


def _joules(record: RunRecord) -> dict[str, float | None]:
    if not has_joules(record):
        return dict.fromkeys(JOULES)
    last = cost_curve(record)[-1]
    return {**last.joules_by_part, "total": last.joules}


def _sim_time_s(record: RunRecord) -> float | None:
    known = [line["sim_time_s"] for line in record.rounds if "sim_time_s" in line]
    return _finite_or_none(sum(known)) if known else None


def _seeds_row(group: Sequence[RunRecord], label: str) -> dict[str, Any]:
    rows = summarise(group)

    def over_seeds(*path: str) -> dict[str, float] | None:
        values = [_value_at(row, path) for row in rows]
        if any(v is None for v in values):
            return None
        return {"mean": fmean(values), "std": stdev(values)}

    return {
        "label": label,
        "method": rows[0]["method"],
        "seeds": [row["seed"] for row in rows],
        "finished": True,
        "rounds": rows[0]["rounds"],
        "accuracy": {k: over_seeds("accuracy", k) for k in ACCURACY},
        "loss": {k: over_seeds("loss", k) for k in LOSS},
        "groups": over_seeds("groups"),
        "bytes_up": over_seeds("bytes_up"),
        "bytes_down": over_seeds("bytes_down"),
        "edges": rows[0]["edges"],
        "bytes_long": over_seeds("bytes_long"),
        "joules": {k: over_seeds("joules", k) for k in JOULES},
        "sim_time_s": over_seeds("sim_time_s"),
        "predict_ms": over_seeds("predict_ms"),
        "wall_s": over_seeds("wall_s"),
    }


def _value_at(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = row
    for key in path:
        value = value[key]
    return value


def _finite_or_none(x: float | None) -> float | None:
    """JSON knows no NaN and no infinity: a diverged number is shown as missing."""
    return x if x is not None and math.isfinite(x) else None
