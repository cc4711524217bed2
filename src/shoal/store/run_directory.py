"""A run directory: config, a line per round, checkpoints, private client state, the result.

rounds.jsonl, clients.jsonl and ledger.jsonl are the same bytes for the same seed; what a clock says is in
timing.jsonl and result.json only.
"""

from __future__ import annotations

import fcntl
import json
import math
import platform
import shutil
from collections.abc import Mapping, Sequence
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
from shoal.store import FORMAT
from shoal.store.atomic_files import append_line, check_writable, read_lines, rewrite_lines, write_json
from shoal.store.checkpoint import NUM_KEPT_CHECKPOINTS, Checkpoints
from shoal.store.failure import FAILURE
from shoal.store.private import PrivateStore
from shoal.types import ServerState

PACKAGES = ("shoal", "torch", "numpy", "scipy", "scikit-learn", "safetensors")
LINE_FILES = ("rounds.jsonl", "clients.jsonl", "ledger.jsonl", "timing.jsonl")


def environment_facts() -> dict[str, Any]:
    return {"format": FORMAT, "python": platform.python_version()} | {p: version(p) for p in PACKAGES}


@dataclass(frozen=True)
class RestoredRun:
    state: ServerState | None
    rounds: list[RoundRecord]
    entries: list[LedgerEntry]
    timing: RoundTiming  # of all these rounds


class RunStore:
    """Open for one process at a time: `create` or `open` it, use it as a context manager."""

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
        """A new run directory: made beside its place, so that what stands there is always complete."""
        cls.check_free(path)
        beside = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            (beside / "checkpoints").mkdir(parents=True)
        except OSError as error:
            raise UserError(f"--out {path} cannot be written: {error.strerror}") from None
        write_json(beside / "config.json", dict(config))
        write_json(beside / "about.json", environment_facts())
        write_json(beside / "partition.json", dict(partition))
        write_json(beside / "devices.json", dict(devices))
        if inputs is not None:
            write_json(beside / "inputs.json", dict(inputs))
        (path / FAILURE).unlink(missing_ok=True)
        beside.rename(path)
        return cls(path, keep_checkpoints)

    @staticmethod
    def check_free(path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {path} is a file; give the name of a folder that is not there yet")
        if path.exists() and any(inside.name != FAILURE for inside in path.iterdir()):
            resume_hint = f"resume it with `shoal resume {path}`, or " if (path / "config.json").exists() else ""
            raise UserError(f"--out {path} exists and is not empty; {resume_hint}choose another")
        check_writable(path)

    @classmethod
    def open(cls, path: Path, keep_checkpoints: int = NUM_KEPT_CHECKPOINTS) -> RunStore:
        for name in ("config.json", "about.json", "partition.json", "checkpoints"):
            if not (path / name).exists():
                raise UserError(f"{path} is not a run directory: it has no {name}")
        file_format = json.loads((path / "about.json").read_text()).get("format")
        if file_format != FORMAT:
            raise UserError(f"{path} was written in format {file_format}; this version of shoal reads {FORMAT}")
        return cls(path, keep_checkpoints)

    def _acquire_lock(self) -> IO[str]:
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(f"{self.path} is being written by another process; wait for it to end") from None
        return lock

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        self._lock.close()

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        return config

    def append(self, record: RoundRecord, entries: Sequence[LedgerEntry], timing: RoundTiming) -> None:
        append_line(self.path / "rounds.jsonl", _null_if_not_finite(record.to_json()))
        if record.evaluation is not None:
            line = evaluation_to_json(record.round, record.evaluation, self._clients)
            append_line(self.path / "clients.jsonl", _null_if_not_finite(line))
        for page in entries:
            append_line(self.path / "ledger.jsonl", page.to_json())
        clock_line = {"wall_s": round(timing.wall_s, 6), "server_s": round(timing.server_s, 6)}
        append_line(self.path / "timing.jsonl", {"round": record.round, **clock_line})

    def checkpoint(self, state: ServerState) -> None:
        self.private.save(state.round)
        self.checkpoints.save(state, self.private.files)
        self._discard_old()

    def _discard_old(self) -> None:
        self.checkpoints.discard_old()
        kept = self.checkpoints.rounds()
        self.private.discard_before(kept[0] if kept else 0)

    def restore(self, device: torch.device | str = "cpu") -> RestoredRun:
        """The last complete round and what is known of those up to it.

        Lines of rounds that have no checkpoint are dropped: those rounds will be played again.
        """
        self._remove_leftovers()
        latest = self.checkpoints.latest(lambda found: self.private.check(found.private), device)
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
            raise UserError(f"{self.path}/rounds.jsonl has {len(records)} of {last_round} rounds; it was altered")
        return RestoredRun(
            latest.state if latest else None,
            records,
            [LedgerEntry.from_json(x) for x in kept_lines["ledger.jsonl"]],
            RoundTiming(*(sum(x[k] for x in kept_lines["timing.jsonl"]) for k in ("wall_s", "server_s"))),
        )

    def load_final_state(self, device: torch.device | str = "cpu") -> ServerState:
        """The state after the last round of a run that is finished; private state with it."""
        if not (self.path / "result.json").exists():
            raise UserError(f"{self.path} is not finished: `shoal resume {self.path}` goes on with it")
        latest = self.checkpoints.latest(lambda found: self.private.check(found.private), device)
        if latest is None:
            raise UserError(f"{self.path} has no checkpoint that is whole")
        self.private.restore(latest.state.round, device)
        return latest.state

    def _remove_leftovers(self) -> None:
        """What a killed process left beside its place, and why the last attempt failed."""
        for left in [*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob(FAILURE)]:
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()

    def discard_if_not_started(self) -> None:
        if not self.checkpoints.rounds():
            shutil.rmtree(self.path)

    def finish(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / "result.json", _null_if_not_finite(dict(result)))


def evaluation_to_json(round_index: int, evaluation: Evaluation, clients: list[str]) -> dict[str, Any]:
    """Columns in the partition's order of clients; null where a client was silent."""
    scores = [evaluation.clients.get(c) for c in clients]
    columns = {k: [None if s is None else getattr(s, k) for s in scores] for k in Score.__dataclass_fields__}
    central = None if evaluation.central is None else vars(evaluation.central)
    return {"round": round_index, "central": central, **columns}


def evaluation_from_json(line: Mapping[str, Any], clients: list[str]) -> Evaluation:
    columns = zip(line["accuracy"], line["loss"], line["f1"], line["n"], strict=True)
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
    unchanged_keys = ("round", "cohort", "metrics", "bytes_down", "bytes_up", "flops", "joules", "sim_time_s")
    late_clients, depleted_clients = (tuple(line.get(k, ())) for k in ("late_clients", "left"))
    bytes_edge_cloud = line.get("bytes_long")
    return RoundRecord(
        **{k: line[k] for k in unchanged_keys},
        evaluation=evaluation,
        late_clients=late_clients,
        depleted_clients=depleted_clients,
        bytes_edge_cloud=bytes_edge_cloud,
    )


def _nan_if_null(x: float | None) -> float:
    return math.nan if x is None else x


def _null_if_not_finite(value: Any) -> Any:
    """JSON has no NaN: a loss that is none becomes null."""
    if isinstance(value, dict):
        return {k: _null_if_not_finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_null_if_not_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
