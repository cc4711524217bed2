"""A run directory as one record, whether the run has finished, is still going or was killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.store import FORMAT
from shoal.store.failure import FAILURE

REQUIRED_KEYS = {
    "config.json": ("method", "rounds", "seed"),
    "about.json": (),
    "partition.json": ("clients", "classes", "counts"),
}
STORAGE_KEYS = {"keep"}  # says how the run was stored, not what was run
MAX_SETTINGS_IN_LABEL = 4


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    partition: Mapping[str, Any]
    rounds: tuple[Mapping[str, Any], ...]
    clients: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    timing: tuple[Mapping[str, Any], ...] = ()
    accuracy_key: str | None = (
        None  # by which accuracy, a key of a round's "accuracy"; None: the central one if there is one
    )
    joules_scope: str = "all"  # whose joules: "all", or "clients" without the server
    failure: str | None = None  # the reason, if it is a job of several and failed

    @property
    def label(self) -> str:
        return str(self.config.get("variant") or self.config["method"])

    @property
    def evaluated_rounds(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(line for line in self.rounds if line.get("accuracy"))

    @property
    def is_finished(self) -> bool:
        return self.result is not None

    @property
    def completed_rounds(self) -> int:
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def status(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.result is None:
            return f"unfinished (round {self.completed_rounds} of {self.config['rounds']})"
        stopped = self.result.get("stopped")
        return f"finished ({stopped} at round {self.completed_rounds})" if stopped else "finished"

    @property
    def settings(self) -> dict[str, Any]:
        """The job on one level: the options of the method's pieces become "piece.key"."""
        pieces = self.config.get("set", {})
        options = {f"{piece}.{k}": v for piece, chosen in pieces.items() for k, v in chosen.items()}
        plain = {k: v for k, v in self.config.items() if k != "set" and k not in STORAGE_KEYS}
        return plain | options


def read_run(
    path: Path | str, *, allow_not_started: bool = False, accuracy_key: str | None = None, joules_scope: str = "all"
) -> RunRecord:
    """`even_unbegun`: also a run that failed before it began, of which there is nothing but the reason."""
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
    if about.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path} has format {about['format']!r}, but this version of shoal reads format {FORMAT}.")
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
    """Why the last attempt of a run failed: `reason` and the job as it was asked for, or nothing."""
    return _read_object(path / FAILURE, ("reason", "config")) if (path / FAILURE).is_file() else {}


def find_run_folders(folder: Path) -> list[Path]:
    """The run directories in a folder that is none itself, such as a grid's."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return []
    return sorted(path for path in folder.iterdir() if any((path / n).is_file() for n in ("config.json", FAILURE)))


def planned_run(path: Path, config: Mapping[str, Any]) -> RunRecord:
    """A run that is yet to come, to see what it will be called."""
    return RunRecord(path, config, about={}, partition={}, rounds=(), clients=(), result=None)


def require_rounds(record: RunRecord) -> None:
    if not record.rounds:
        raise UserError(f"{record.path} holds no rounds yet: rounds.jsonl needs at least one complete line.")


def run_labels(records: Sequence[RunRecord]) -> list[str]:
    """One name per run: the method, then what differs among runs of that method, then the folder."""
    names = [_label_among(r, [other for other in records if other.label == r.label]) for r in records]
    for part in (lambda r: r.path.name, lambda r: str(r.path)):
        names = [f"{n} · {part(r)}" if names.count(n) > 1 else n for n, r in zip(names, records, strict=True)]
    return names


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """The settings that are not the same in all records, in the order of the first record. Those that failed before
    they began have no say: their open choices were never made."""
    records = [r for r in records if r.partition] or records
    every = dict.fromkeys(k for r in records for k in r.settings)
    return [k for k in every if any(r.settings.get(k) != records[0].settings.get(k) for r in records)]


def runs_by_job(records: Sequence[RunRecord]) -> list[tuple[str, list[RunRecord]]]:
    """A name and the runs of every job, one per seed: what differs only in the seed is one job.

    Unfinished runs count only where a job has no finished one, failed ones nowhere. Of two runs with one seed the first
    counts.
    """
    jobs: dict[str, list[RunRecord]] = {}
    for record in (r for r in records if r.failure is None):
        jobs.setdefault(json.dumps(_without_seed(record).settings, sort_keys=True), []).append(record)
    groups = [[r for r in runs if r.is_finished] or runs for runs in jobs.values()]
    groups = [list({r.config["seed"]: r for r in reversed(runs)}.values())[::-1] for runs in groups]
    return list(zip(run_labels([_without_seed(runs[0]) for runs in groups]), groups, strict=True))


def _without_seed(record: RunRecord) -> RunRecord:
    return replace(record, config={k: v for k, v in record.config.items() if k != "seed"})


def _label_among(record: RunRecord, same_method: Sequence[RunRecord]) -> str:
    """A key without a value is left out: who has one says so."""
    chosen = {k: record.settings.get(k) for k in differing_settings(same_method)}
    parts = [f"{k}={v}" for k, v in chosen.items() if v is not None]
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
        raise UserError(f"{path} holds a {type(value).__name__} where a JSON object is right.")
    if missing := [f for f in fields if f not in value]:
        raise UserError(f"{path} lacks the field {missing[0]!r}: it was not written by a shoal run.")
    return value


def _read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """All complete lines. A killed process may leave the last one cut short; any other must be readable."""
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
