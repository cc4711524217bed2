"""Reads a run directory into one record, whether the run is finished, still running, or was killed.

`run_directory.py` writes the directory and resumes the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.store import check_format
from shoal.store.failure import FAILURE

REQUIRED_KEYS = {
    "config.json": ("method", "rounds", "seed"),
    "about.json": (),
    "partition.json": ("clients", "classes", "counts"),
}
STORAGE_KEYS = {"keep_checkpoints"}  # they do not change what is computed, so they are no difference between runs
MAX_SETTINGS_IN_LABEL = 4


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory."""

    path: Path
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    partition: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    clients: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    timing: tuple[Mapping[str, Any], ...] = ()
    accuracy_key: str | None = None  # key of a round's "accuracy"; None: central if the run has it, else local
    joules_scope: str = "all"  # "all", or "clients" for the joules without the server
    failure: str | None = None  # why the run failed, if it is one of several jobs

    @property
    def label(self) -> str:
        """The variant of the method if it has a name, else the method."""
        return str(self.config.get("variant") or self.config["method"])

    @property
    def evaluated_rounds(self) -> tuple[Mapping[str, Any], ...]:
        """The lines of the rounds that were evaluated."""
        return tuple(line for line in self.rounds if line.get("accuracy"))

    @property
    def is_finished(self) -> bool:
        """Whether the run has a result."""
        return self.result is not None

    @property
    def completed_rounds(self) -> int:
        """The number of the last complete round, 0 if there is none."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def status(self) -> str:
        """How far the run is, and why it stopped early if it did."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.result is None:
            return f"unfinished (round {self.completed_rounds} of {self.config['rounds']})"
        stop_reason = self.result.get("stop_reason")
        return f"finished ({stop_reason} at round {self.completed_rounds})" if stop_reason else "finished"

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the job, and the options of the method as "group.key"."""
        groups = self.config.get("set", {})
        options = {f"{group}.{k}": v for group, values in groups.items() for k, v in values.items()}
        job_keys = {k: v for k, v in self.config.items() if k != "set" and k not in STORAGE_KEYS}
        return job_keys | options


def read_run(
    path: Path | str, *, allow_not_started: bool = False, accuracy_key: str | None = None, joules_scope: str = "all"
) -> RunRecord:
    """Reads a run directory.

    Parameters
    ----------
    path : Path or str
        The run directory.
    allow_not_started : bool
        Also read a run that failed before it started, which has only failure.json.
    accuracy_key : str or None
        The accuracy by which the run is judged, a key of a round's "accuracy". None: central if the run has it, else
        local.
    joules_scope : str
        The joules that are counted: "all", or "clients" without the server's.

    Returns
    -------
    RunRecord
        The content of the directory.

    Raises
    ------
    UserError
        If `path` is not a run directory, has another format, or has a damaged file.
    """
    path = Path(path)
    failure = read_failure(path)
    if allow_not_started and failure and not (path / "config.json").exists():
        return replace(planned_run(path, failure["config"]), failure=failure["reason"])
    if not path.is_dir():
        raise UserError(
            f"{path} is not a run directory: {'it is a file' if path.exists() else 'there is no such folder'}."
        )
    if missing := [name for name in REQUIRED_KEYS if not (path / name).is_file()]:
        raise UserError(f"{path} is not a run directory: it lacks {' and '.join(missing)}.")
    config, about, partition = (_read_object(path / name, fields) for name, fields in REQUIRED_KEYS.items())
    check_format(path, about)
    result = _read_object(path / "result.json") if (path / "result.json").is_file() else None
    return RunRecord(
        path=path,
        config=config,
        about=about,
        partition=partition,
        rounds=_read_lines(path / "rounds.jsonl"),
        clients=_read_lines(path / "clients.jsonl"),
        result=result,
        timing=_read_lines(path / "timing.jsonl"),
        accuracy_key=accuracy_key,
        joules_scope=joules_scope,
        failure=failure.get("reason") if result is None else None,
    )


def read_failure(path: Path) -> dict[str, Any]:
    """Returns the reason why the last attempt of a run failed, and its job; empty if it did not fail."""
    return _read_object(path / FAILURE, ("reason", "config")) if (path / FAILURE).is_file() else {}


def find_run_folders(folder: Path) -> list[Path]:
    """Returns the run directories in a folder that is no run directory itself, such as the folder of a grid."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return []
    return sorted(path for path in folder.iterdir() if any((path / n).is_file() for n in ("config.json", FAILURE)))


def planned_run(path: Path, config: Mapping[str, Any]) -> RunRecord:
    """Returns the record of a run that has not started, so that its label can be computed."""
    return RunRecord(path, config, about={}, partition={}, rounds=(), clients=(), result=None)


def require_rounds(record: RunRecord) -> None:
    """Raises a UserError if the run has no complete round."""
    if not record.rounds:
        raise UserError(f"{record.path} has no rounds yet: rounds.jsonl needs at least one complete line.")


def run_labels(records: Sequence[RunRecord]) -> list[str]:
    """Returns a label for each run: the method, the settings that differ among its runs, and the folder if needed."""
    labels = [_label_among(r, [other for other in records if other.label == r.label]) for r in records]
    for folder in (lambda r: r.path.name, lambda r: str(r.path)):
        labels = [f"{n} · {folder(r)}" if labels.count(n) > 1 else n for n, r in zip(labels, records, strict=True)]
    return labels


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """Returns the settings that are not the same in all records, in the order of the first record.

    Runs that failed before they started are left out, because their defaults were never filled in.
    """
    records = [r for r in records if r.partition] or records
    all_keys = dict.fromkeys(k for r in records for k in r.settings)
    return [k for k in all_keys if any(r.settings.get(k) != records[0].settings.get(k) for r in records)]


def runs_by_job(records: Sequence[RunRecord]) -> list[tuple[str, list[RunRecord]]]:
    """Returns a label and the runs of every job. Runs that differ only in the seed belong to one job.

    A job has one run per seed: the first, if there are several. Unfinished runs count only if the job has no finished
    run, and failed runs do not count.
    """
    jobs: dict[str, list[RunRecord]] = {}
    for record in (r for r in records if r.failure is None):
        jobs.setdefault(json.dumps(_without_seed(record).settings, sort_keys=True), []).append(record)
    runs_of_jobs = [[r for r in runs if r.is_finished] or runs for runs in jobs.values()]
    runs_of_jobs = [list({r.config["seed"]: r for r in reversed(runs)}.values())[::-1] for runs in runs_of_jobs]
    return list(zip(run_labels([_without_seed(runs[0]) for runs in runs_of_jobs]), runs_of_jobs, strict=True))


def _without_seed(record: RunRecord) -> RunRecord:
    return replace(record, config={k: v for k, v in record.config.items() if k != "seed"})


def _label_among(record: RunRecord, same_method: Sequence[RunRecord]) -> str:
    """Returns the label of a run among the runs of its method. Settings without a value are left out."""
    values = {k: record.settings.get(k) for k in differing_settings(same_method)}
    parts = [f"{k}={v}" for k, v in values.items() if v is not None]
    return " ".join(
        (
            record.label,
            *parts[:MAX_SETTINGS_IN_LABEL],
            *("…" for _ in parts[MAX_SETTINGS_IN_LABEL : MAX_SETTINGS_IN_LABEL + 1]),
        )
    )


def _read_object(path: Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not readable as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} contains a {type(value).__name__}, but it must contain a JSON object.")
    if missing := [f for f in fields if f not in value]:
        raise UserError(f"{path} has no field {missing[0]!r}: it was not written by a run of shoal.")
    return value


def _read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Returns all complete lines. Only the last one may be unreadable, because a killed process can cut it short."""
    if not path.is_file():
        return ()
    texts = [t for t in path.read_bytes().split(b"\n") if t.strip()]
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                break
            raise UserError(f"{path} is damaged: line {number} is not readable as JSON.") from error
        if not isinstance(line, dict):
            raise UserError(f"{path} is damaged: line {number} is not a JSON object.")
        lines.append(line)
    return tuple(lines)
