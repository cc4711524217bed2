"""The result table: one row per run, the means of rows over seeds, and the columns that show them.

`terminal.py` and `html.py` draw the table. `shoal compare --json` prints the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.filesize import decimal

from shoal.report.cost_curves import JOULE_PARTS, cost_curve, has_joules
from shoal.store.reader import RunRecord, differing_settings, run_labels, runs_by_job

ACCURACY = ("local", "std", "worst10", "f1", "central")
LOSS = ("local", "central")
JOULES = (*JOULE_PARTS, "total")
COMPARABILITY_KEYS = ("data", "partition", "clients")
SI_PREFIXES = {-2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G"}


def percent_text(x: float) -> str:
    """Returns a fraction in percent, without the sign: 75.1."""
    return f"{100 * x:.1f}"


def size_text(x: float) -> str:
    """Returns a number of bytes with its unit: 4.0 kB."""
    return decimal(round(x))


def joules_text(x: float) -> str:
    """Returns joules with three digits and their unit: 3.85 kJ."""
    digits, power = f"{x:.2e}".split("e")
    thousands = min(max(int(power) // 3, min(SI_PREFIXES)), max(SI_PREFIXES))
    places = int(power) - 3 * thousands
    if not float(digits):
        return "0 J"
    return f"{float(digits) * 10.0**places:,.{max(0, 2 - places)}f} {SI_PREFIXES[thousands]}J"


def joules_unit(largest: float) -> tuple[float, str]:
    """Returns factor and name of the unit for an axis up to `largest` joules: (1000.0, "kJ")."""
    thousands = max((t for t in SI_PREFIXES if 1000.0**t <= largest), default=0)
    return 1000.0**thousands, f"{SI_PREFIXES[thousands]}J"


def duration_text(seconds: float) -> str:
    """Returns a duration in a suitable unit: 31.2 ms, 4.5 s, 1m 30s or 2h 03m."""
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
    """A column of the result table: where its value is in a row, and how it is shown."""

    title: str
    path: tuple[str, ...]
    choose_best: Callable[[Sequence[float]], float] | None  # None if no value is better than another
    show: Callable[[float], str]
    meaning: str
    is_optional: bool = False  # hidden if no run has a value
    requires: str = ""  # a key of the row; hidden if no run has a value there

    def value(self, row: Mapping[str, Any]) -> Any:
        """Returns the value of a row, or None."""
        return _value_at(row, self.path)

    def text(self, row: Mapping[str, Any]) -> str:
        """Returns the value as text. In a row over seeds it is the mean, with the deviation on a second line."""
        value = self.value(row)
        if value is None:
            return "–"
        if isinstance(value, Mapping):
            spread = self.show(value["std"]) if value["std"] else "0"
            return f"{self.show(value['mean'])}\n± {spread}"
        return self.show(value)


COLUMNS = (
    Column("Local %", ("accuracy", "local"), max, percent_text, "mean accuracy on the clients’ own test sets"),
    Column("Std %", ("accuracy", "std"), min, percent_text, "standard deviation of local accuracy across clients"),
    Column(
        "Worst 10 %", ("accuracy", "worst10"), max, percent_text, "mean local accuracy of the worst tenth of clients"
    ),
    Column("F1 %", ("accuracy", "f1"), max, percent_text, "mean macro F1 on the clients’ own test sets"),
    Column("Central %", ("accuracy", "central"), max, percent_text, "accuracy on the central test set"),
    Column("Loss", ("loss", "local"), min, "{:.3f}".format, "mean loss on the clients’ own test sets"),
    Column(
        "Clusters",
        ("num_clusters",),
        None,
        "{:.3g}".format,
        "number of clusters (clients of a cluster share a model)",
        True,
    ),
    Column("Up", ("bytes_up",), min, size_text, "bytes from the clients to the server in the whole run"),
    Column("Down", ("bytes_down",), min, size_text, "bytes from the server to the clients in the whole run"),
    Column(
        "Edge-cloud link",
        ("bytes_edge_cloud",),
        min,
        size_text,
        "bytes to and from the cloud in the whole run, by the edge servers, or by the clients in a run without edges",
        requires="num_edges",
    ),
    Column(
        "Joules",
        ("joules", "total"),
        min,
        joules_text,
        "joules of all clients and of the server (unless it is excluded) in the whole run",
        True,
    ),
    Column(
        "Sim time",
        ("sim_time_s",),
        min,
        duration_text,
        "simulated time of the run on the clients’ devices and links",
        True,
    ),
    Column("Predict", ("predict_ms",), None, "{:.2f} ms".format, "time to predict 32 samples on one thread", True),
    Column("Time", ("wall_s",), None, duration_text, "wall time of the run, which depends on the machine’s load"),
)


def summarise(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns one row per run. An unfinished run has the accuracy of its last evaluated round and its bytes so far."""
    return [_run_row(r, name) for r, name in zip(records, run_labels(records), strict=True)]


def summarise_seeds(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns one row per job that finished with two seeds or more. Each number becomes {"mean", "std"} over seeds.

    The deviation is that of a sample (n − 1). A job that was run twice with one seed counts once.
    """
    jobs = [(name, runs) for name, runs in runs_by_job(records) if len(runs) > 1 and runs[0].is_finished]
    return [_seeds_row(runs, name) for name, runs in jobs]


def shown_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns that are not hidden for these rows."""

    def has(column: Column, row: Mapping[str, Any]) -> bool:
        return (
            bool(row[column.requires]) if column.requires else not column.is_optional or column.value(row) is not None
        )

    return [c for c in COLUMNS if any(has(c, row) for row in rows)]


def best_rows(rows: Sequence[Mapping[str, Any]], column: Column) -> set[int]:
    """Returns the finished rows with the column's best number, or none if all rows have the same number."""
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
    """Returns a caution if the runs differ in settings that make their numbers incomparable, else an empty string."""
    if differing := [k for k in differing_settings(records) if k in COMPARABILITY_KEYS]:
        return f"These runs differ in {', '.join(differing)}, so their numbers are not directly comparable."
    return ""


def run_remarks(records: Sequence[RunRecord]) -> list[str]:
    """Returns sentences on what the numbers do not show.

    They name runs that ended early, late reports, rejected reports, depleted clients and the notes of methods. Failed
    runs have none.
    """
    run_notes, notes = [], dict[str, list[str]]()
    for name, run in [(n, r) for n, r in zip(run_labels(records), records, strict=True) if r.failure is None]:
        num_late_reports = sum(line.get("num_late_reports", 0) for line in run.rounds)
        num_rejected_reports = sum(len(line.get("rejected_reports", ())) for line in run.rounds)
        num_depleted_clients = sum(len(line.get("depleted_clients", ())) for line in run.rounds)
        facts = [run.status] if run.status != "finished" else []
        facts += [f"{_count_text(num_late_reports, 'late report')}"] if num_late_reports else []
        facts += [f"{_count_text(num_rejected_reports, 'rejected report')}"] if num_rejected_reports else []
        facts += [f"{_count_text(num_depleted_clients, 'depleted client')}"] if num_depleted_clients else []
        has_details = num_late_reports or num_rejected_reports or num_depleted_clients
        details = " (rounds.jsonl names the clients)" if has_details else ""
        run_notes += [f"{name}: {', '.join(facts)}{details}."] if facts else []
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
    edge_cloud_bytes = [line["bytes_edge_cloud"] for line in record.rounds if "bytes_edge_cloud" in line]
    return {
        "run_dir": str(record.path),
        "label": label,
        "method": record.config["method"],
        "seed": record.config["seed"],
        "finished": record.is_finished,
        "status": record.status,
        "failure": record.failure,
        "completed_rounds": record.completed_rounds,
        "accuracy": {k: _finite_or_none(accuracy.get(k)) for k in ACCURACY},
        "loss": {k: _finite_or_none(loss.get(k)) for k in LOSS},
        "num_clusters": _num_clusters(result),
        **traffic,
        "num_edges": len(result["edges"]) if "edges" in result else int(bool(edge_cloud_bytes)),
        "bytes_edge_cloud": sum(edge_cloud_bytes) if edge_cloud_bytes else sum(traffic.values()),
        "joules": _joules(record),
        "sim_time_s": _sim_time_s(record),
        "predict_ms": _finite_or_none(result.get("predict_ms")),
        "wall_s": _finite_or_none(result.get("wall_s", sum(line["wall_s"] for line in record.timing))),
    }


def _num_clusters(result: Mapping[str, Any]) -> int | None:
    """Returns the number of clusters that have clients."""
    return sum(1 for cluster in result["clusters"] if cluster["clients"]) if "clusters" in result else None


def _joules(record: RunRecord) -> dict[str, float | None]:
    if not has_joules(record):
        return dict.fromkeys(JOULES)
    last = cost_curve(record)[-1]
    return {**last.joules_by_part, "total": last.joules}


def _sim_time_s(record: RunRecord) -> float | None:
    times_s = [line["sim_time_s"] for line in record.rounds if "sim_time_s" in line]
    return _finite_or_none(sum(times_s)) if times_s else None


def _seeds_row(runs: Sequence[RunRecord], label: str) -> dict[str, Any]:
    rows = summarise(runs)

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
        "completed_rounds": rows[0]["completed_rounds"],
        "accuracy": {k: over_seeds("accuracy", k) for k in ACCURACY},
        "loss": {k: over_seeds("loss", k) for k in LOSS},
        "num_clusters": over_seeds("num_clusters"),
        "bytes_up": over_seeds("bytes_up"),
        "bytes_down": over_seeds("bytes_down"),
        "num_edges": rows[0]["num_edges"],
        "bytes_edge_cloud": over_seeds("bytes_edge_cloud"),
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
    """Returns None for a diverged number, because JSON has no NaN and no infinity."""
    return x if x is not None and math.isfinite(x) else None
