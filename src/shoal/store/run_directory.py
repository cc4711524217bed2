"""A run directory: the job, one line per round, checkpoints, the clients' private state, and the result.

rounds.jsonl, clients.jsonl and ledger.jsonl have the same bytes for the same seed. Times of a clock are in
timing.jsonl and result.json only.

Read `checkpoint.py` next for the server's state, `private.py` for the clients' private state, and `reader.py` for
reading a directory without resuming its run.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from shoal.cost.ledger import LedgerEntry
from shoal.engine import Evaluation, RoundRecord, RoundTiming
from shoal.errors import UserError
from shoal.metrics import Score
from shoal.store import FORMAT, check_format
from shoal.store.atomic_files import (
    append_lines,
    check_writable,
    json_bytes,
    make_folder,
    read_lines,
    rewrite_lines,
    sync_folder,
    write_file,
    write_json,
)
from shoal.store.checkpoint import NUM_KEPT_CHECKPOINTS, Checkpoints
from shoal.store.failure import FAILURE
from shoal.store.private import PrivateStore
from shoal.types import ServerState

PACKAGES = ("shoal", "torch", "numpy", "scipy", "scikit-learn", "safetensors")
LINE_FILES = ("rounds.jsonl", "clients.jsonl", "ledger.jsonl", "timing.jsonl")


def environment_facts() -> dict[str, Any]:
    """Returns the content of about.json: the format, and the versions of Python and of the packages."""
    return {"format": FORMAT, "python": platform.python_version()} | {p: version(p) for p in PACKAGES}


@dataclass(frozen=True)
class RestoredRun:
    """What a run needs to resume: the state after the last complete round, and the records up to that round."""

    state: ServerState | None  # None if no round is complete
    rounds: list[RoundRecord]
    entries: list[LedgerEntry]
    timing: RoundTiming  # sums over these rounds


class RunStore:
    """A run directory that one process at a time may write.

    `create` or `open` it, and use it as a context manager, which releases the lock.

    Parameters
    ----------
    path : Path
        The run directory.
    keep_checkpoints : int
        Number of checkpoints that are kept, the newest ones.
    """

    def __init__(self, path: Path, keep_checkpoints: int = NUM_KEPT_CHECKPOINTS) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep_checkpoints)
        self.private = PrivateStore(path / "private")
        self._clients: list[str] = json.loads((path / "partition.json").read_text())["clients"]
        self._lock: IO[str] = self._acquire_lock()

    @classmethod
    def create(
        cls,
        path: Path,
        config: Mapping[str, Any],
        partition: Mapping[str, Any],
        devices: Mapping[str, Any],
        keep_checkpoints: int = NUM_KEPT_CHECKPOINTS,
        inputs: Mapping[str, Any] | None = None,
    ) -> RunStore:
        """Creates a run directory and opens it.

        The directory is filled under another name beside `path` and renamed, so that a directory at `path` is always
        complete.

        Parameters
        ----------
        path : Path
            The new directory. It must not exist, or be empty.
        config, partition, devices : Mapping
            The contents of config.json, partition.json and devices.json.
        keep_checkpoints : int
            Number of checkpoints that are kept, the newest ones.
        inputs : Mapping or None
            The content of inputs.json, or None for a run without that file.

        Returns
        -------
        RunStore
            The open run directory.

        Raises
        ------
        UserError
            If `path` is a file, is not empty, or cannot be written.
        """
        files: dict[str, Mapping[str, Any]] = {
            "config.json": config,
            "about.json": environment_facts(),
            "partition.json": partition,
            "devices.json": devices,
        }
        files |= {"inputs.json": inputs} if inputs is not None else {}
        cls.check_free(path)
        with _explained(path):
            make_folder(path.absolute().parent)
            with _one_at_a_time(path.absolute().parent):
                cls.check_free(path)  # another process may have been faster
                cls._fill(path, {name: json_bytes(dict(content)) for name, content in files.items()})
        return cls(path, keep_checkpoints)

    @staticmethod
    def _fill(path: Path, files: Mapping[str, bytes]) -> None:
        """Creates a run directory with these files and an empty folder for checkpoints."""
        temporary_folder = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary_folder, ignore_errors=True)
        try:
            make_folder(temporary_folder / "checkpoints")
            for name, data in files.items():
                write_file(temporary_folder / name, data)
            sync_folder(temporary_folder)
            (path / FAILURE).unlink(missing_ok=True)  # rename needs an empty folder
            os.rename(temporary_folder, path)
        except BaseException:
            shutil.rmtree(temporary_folder, ignore_errors=True)
            raise
        sync_folder(path.absolute().parent)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raises a UserError if a new run directory cannot be created at this path."""
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {path} is a file. Choose the name of a folder that does not exist yet.")
        if path.exists() and any(inside.name != FAILURE for inside in path.iterdir()):
            resume_hint = f"Resume it with `shoal resume {path}`, or c" if (path / "config.json").exists() else "C"
            raise UserError(f"--out {path} exists and is not empty. {resume_hint}hoose another folder.")
        check_writable(path)

    @classmethod
    def open(cls, path: Path, keep_checkpoints: int = NUM_KEPT_CHECKPOINTS) -> RunStore:
        """Opens an existing run directory.

        Parameters
        ----------
        path : Path
            The run directory.
        keep_checkpoints : int
            Number of checkpoints that are kept, the newest ones.

        Returns
        -------
        RunStore
            The open run directory.

        Raises
        ------
        UserError
            If `path` is not a run directory, has another format, or is open in another process.
        """
        for name in ("config.json", "about.json", "partition.json", "checkpoints"):
            if not (path / name).exists():
                raise UserError(f"{path} is not a run directory: it has no {name}.")
        check_format(path, json.loads((path / "about.json").read_text()))
        return cls(path, keep_checkpoints)

    def _acquire_lock(self) -> IO[str]:
        with _explained(self.path):
            lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"{self.path} is being written by another process. Wait until that process ends.") from None
        return lock

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        try:
            self.private.discard_unnamed_parts()
        finally:
            self._lock.close()

    @property
    def config(self) -> dict[str, Any]:
        """The job of the run, as in config.json."""
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        return config

    def append(self, record: RoundRecord, entries: Sequence[LedgerEntry], timing: RoundTiming) -> None:
        """Writes the lines of a finished round. When this returns, they are on the disk."""
        seconds = {"wall_s": round(timing.wall_s, 6), "server_s": round(timing.server_s, 6)}
        lines = {
            "rounds.jsonl": [_null_if_not_finite(record.to_json())],
            "clients.jsonl": [],
            "ledger.jsonl": [entry.to_json() for entry in entries],
            "timing.jsonl": [{"round": record.round, **seconds}],
        }
        if record.evaluation is not None:
            line = evaluation_to_json(record.round, record.evaluation, self._clients)
            lines["clients.jsonl"] = [_null_if_not_finite(line)]
        with self._explained_with_hint():
            for name, values in lines.items():
                if values:
                    append_lines(self.path / name, values)

    def checkpoint(self, state: ServerState) -> None:
        """Saves the server's state with the clients' private state, and removes checkpoints that are too old.

        When this returns, the round is complete: its lines, its private state and its checkpoint are on the disk.
        """
        with self._explained_with_hint():
            self.private.save(state.round)
            self.checkpoints.save(state, self.private.files)
            self._discard_old()

    @contextmanager
    def _explained_with_hint(self) -> Iterator[None]:
        """Turns an error of the operating system into a UserError that says how the run continues."""
        is_started = bool(self.checkpoints.rounds())
        hint = f" Correct this, and continue with `shoal resume {self.path}`." if is_started else ""
        with _explained(self.path, hint):
            yield

    def _discard_old(self) -> None:
        self.checkpoints.discard_old()
        rounds = self.checkpoints.rounds()
        self.private.discard_before(rounds[0] if rounds else 0)

    def restore(self, device: torch.device | str = "cpu") -> RestoredRun:
        """Returns the last complete round with the records up to it.

        Lines of later rounds are removed, because those rounds have no checkpoint and will run again.
        """
        with _explained(self.path):
            return self._restore(device)

    def _restore(self, device: torch.device | str) -> RestoredRun:
        self._remove_leftovers()
        latest = self.checkpoints.latest(lambda checkpoint: self.private.check(checkpoint.private), device)
        last_round = latest.state.round if latest else 0
        self.private.restore(last_round, device)
        self.checkpoints.discard_after(last_round)
        self._discard_old()
        kept_lines = {
            name: [x for x in read_lines(self.path / name) if x["round"] <= last_round] for name in LINE_FILES
        }
        for name, lines in kept_lines.items():
            rewrite_lines(self.path / name, lines)
        evaluations = {x["round"]: evaluation_from_json(x, self._clients) for x in kept_lines["clients.jsonl"]}
        records = [round_record_from_json(x, evaluations.get(x["round"])) for x in kept_lines["rounds.jsonl"]]
        if len(records) != last_round:
            raise UserError(
                f"{self.path}/rounds.jsonl has {len(records)} of {last_round} rounds: the file was changed."
            )
        return RestoredRun(
            latest.state if latest else None,
            records,
            [LedgerEntry.from_json(x) for x in kept_lines["ledger.jsonl"]],
            RoundTiming(*(sum(x[k] for x in kept_lines["timing.jsonl"]) for k in ("wall_s", "server_s"))),
        )

    def load_final_state(self, device: torch.device | str = "cpu") -> ServerState:
        """Returns the server's state after the last round of a finished run, and restores the private state."""
        if not (self.path / "result.json").exists():
            raise UserError(f"{self.path} is not finished. Finish the run with `shoal resume {self.path}`.")
        latest = self.checkpoints.latest(lambda checkpoint: self.private.check(checkpoint.private), device)
        if latest is None:
            raise UserError(f"{self.path} has no undamaged checkpoint.")
        self.private.restore(latest.state.round, device)
        return latest.state

    def _remove_leftovers(self) -> None:
        """Removes temporary files of a killed process, and the failure record of the last attempt."""
        for leftover in [*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob(FAILURE)]:
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()

    def discard_if_not_started(self) -> None:
        """Removes the run directory if it has no checkpoint yet."""
        if not self.checkpoints.rounds():
            shutil.rmtree(self.path, ignore_errors=True)  # the reason to stop may be that nothing can be written

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes result.json, which marks the run as finished."""
        with self._explained_with_hint():
            write_json(self.path / "result.json", _null_if_not_finite(dict(result)))


@contextmanager
def _explained(path: Path, hint: str = "") -> Iterator[None]:
    """Turns an error of the operating system into a UserError about the run directory, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        file_text = f" ({error.filename})" if error.filename else ""
        raise UserError(f"{path} cannot be written: {error.strerror or error}{file_text}.{hint}") from error


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets one process after the other create a run directory in a folder, on file systems that can lock a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def evaluation_to_json(round_index: int, evaluation: Evaluation, clients: list[str]) -> dict[str, Any]:
    """Returns the line of clients.jsonl for a round.

    Each column has a value per client, in the order of the partition, and null for a client without a score.
    """
    scores = [evaluation.clients.get(c) for c in clients]
    columns = {k: [None if s is None else getattr(s, k) for s in scores] for k in Score.__dataclass_fields__}
    central = None if evaluation.central is None else vars(evaluation.central)
    return {"round": round_index, "central": central, **columns}


def evaluation_from_json(line: Mapping[str, Any], clients: list[str]) -> Evaluation:
    """Returns the evaluation in a line of clients.jsonl."""
    columns = zip(line["accuracy"], line["loss"], line["f1"], line["num_samples"], strict=True)
    scores = {
        c: Score(a, _nan_if_null(loss), f1, n)
        for c, (a, loss, f1, n) in zip(clients, columns, strict=True)
        if a is not None
    }
    central = line["central"]
    return Evaluation(
        scores, Score(**central | {"loss": _nan_if_null(central["loss"])}) if central is not None else None
    )


def round_record_from_json(line: Mapping[str, Any], evaluation: Evaluation | None) -> RoundRecord:
    """Returns the record in a line of rounds.jsonl, with the evaluation of that round."""
    unchanged_keys = ("round", "cohort_size", "metrics", "bytes_down", "bytes_up", "flops", "joules", "sim_time_s")
    return RoundRecord(
        **{k: line[k] for k in unchanged_keys},
        evaluation=evaluation,
        late_clients=tuple(line["late_clients"]),
        depleted_clients=tuple(line["depleted_clients"]),
        bytes_edge_cloud=line.get("bytes_edge_cloud"),
        rejected=line.get("rejected_reports", {}),
    )


def _nan_if_null(x: float | None) -> float:
    return math.nan if x is None else x


def _null_if_not_finite(value: Any) -> Any:
    """Returns the value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _null_if_not_finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_null_if_not_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
