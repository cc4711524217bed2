"""Stops runs at every change of the disk, as `kill -9` and as a power cut do, and compares what they become.

`Disk` stands between a run and the operating system. It counts every change below a folder: a file that is opened for
writing, each half of a write, a rename, a removal, a new folder and an fsync. It ends the run at a given change. After
that, nothing in this run reaches the disk, not even a clean-up.

After a killed process, all earlier changes are there. After a power cut, only those are certain that an fsync forced to
the disk: the content of a file after an fsync of the file, and the names in a folder after an fsync of the folder.
`Disk.survivors` writes exactly these, and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from shoal.experiment.job import Job
from shoal.experiment.run import run_or_resume

Way = Literal["kill", "power cut"]
NOT_COMPARED = ("timing.jsonl", "result.json", "lock")  # they contain times of a clock, or nothing

# Private state, checkpoints that are removed, rounds with and without evaluation, and quick rounds.
SMALL_JOB = Job(
    method="fedavg-ft",
    data="digits",
    clients=5,
    max_train_samples=200,
    rounds=4,
    cohort=2,
    epochs=1,
    eval_every=3,
    keep_checkpoints=2,
    fleet="plain",
    set={"personalise": {"epochs": 1}},
)


class Stopped(BaseException):
    """The end of a process. It is no Exception, so that no code handles it."""


@dataclass
class _File:
    durable: bytes = b""


@dataclass
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)


_OPERATIONS = ("open", "close", "write", "ftruncate", "fsync", "rename", "unlink", "mkdir", "rmdir")
_disks: list[Disk] = []  # those in use, for the audit hook, which cannot be removed


class Disk:
    """The disk of a run: counts its changes and ends the run at one of them.

    Parameters
    ----------
    folder
        The folder whose changes count. It must be empty at the start for `survivors`.
    stop_at
        The number of the change before which the run ends, from 1, or None for no end.
    stop
        Function that ends the run. By default it raises `Stopped`.
    """

    def __init__(self, folder: Path, stop_at: int | None = None, stop: Callable[[], Any] | None = None) -> None:
        self.folder, self.stop_at, self.stop = folder.resolve(), stop_at, stop
        self.changes: list[str] = []
        self.unwatched: list[str] = []  # files that were opened for writing in another way than by os.open
        self.has_stopped = False
        self._root = _Folder()
        self._open_files: dict[int, _File | _Folder] = {}
        self._real = {name: getattr(os, name) for name in _OPERATIONS}

    @contextmanager
    def watch(self) -> Iterator[Disk]:
        """Watches all changes inside the block."""
        own = {name: getattr(self, f"_{name}") for name in _OPERATIONS}
        _install_audit_hook()
        _disks.append(self)
        try:
            with patch.multiple(os, **own, replace=self._rename, remove=self._unlink):
                yield self
        finally:
            _disks.remove(self)

    def survivors(self, folder: Path) -> None:
        """Writes into a folder what is certain to be there after a power cut."""
        _write_durable(self._root, folder)

    def adopt(self) -> None:
        """Takes the files that are in the folder already as files on the disk."""
        self._root = _read_node(self.folder)

    def _change(self, kind: str, path: Path) -> None:
        if self.has_stopped:
            raise Stopped
        self.changes.append(f"{kind} {path.relative_to(self.folder)}")
        if len(self.changes) == self.stop_at:
            self.has_stopped = True
            if self.stop is not None:
                self.stop()
            raise Stopped

    def _resolve(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """Returns the absolute path, or None if it is not below the folder."""
        base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        absolute = Path(os.path.normpath(base / os.fsdecode(path)))
        return absolute if absolute == self.folder or self.folder in absolute.parents else None

    def _node(self, path: Path) -> Any:
        node: Any = self._root
        for part in path.relative_to(self.folder).parts:
            node = node.names[part]
        return node

    def _parent(self, path: Path) -> _Folder:
        return self._node(path.parent)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_unnamed = flags & os.O_TMPFILE == os.O_TMPFILE  # a test whether the folder can be written
        target = None if is_unnamed else self._resolve(path, dir_fd)
        is_written = target is not None and bool(flags & (os.O_WRONLY | os.O_RDWR))
        if is_written:
            self._change("open", target)
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if is_written:
            self._parent(target).names.setdefault(target.name, _File())
        if target is not None:
            self._open_files[descriptor] = self._node(target)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._open_files.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        if descriptor not in self._open_files:
            return self._real["write"](descriptor, data)
        data, path = bytes(data), _path_of(descriptor)
        half = len(data) // 2
        self._change("write first half", path)
        self._real["write"](descriptor, data[:half])
        self._change("write second half", path)
        self._real["write"](descriptor, data[half:])
        return len(data)

    def _ftruncate(self, descriptor: int, length: int) -> None:
        if descriptor in self._open_files:
            self._change("truncate", _path_of(descriptor))
        self._real["ftruncate"](descriptor, length)

    def _fsync(self, descriptor: int) -> None:
        node = self._open_files.get(descriptor)
        if node is None:
            return self._real["fsync"](descriptor)
        self._change("fsync", _path_of(descriptor))
        if isinstance(node, _File):
            node.durable = _path_of(descriptor).read_bytes()
        else:
            node.durable = dict(node.names)
        return None  # the real disk is not needed, because `survivors` knows what is on it

    def _rename(self, source: Any, target: Any, **dir_fds: Any) -> None:
        old, new = self._resolve(source), self._resolve(target)
        if new is not None:
            self._change("rename", new)
        self._real["rename"](source, target, **dir_fds)
        if old is not None and new is not None:
            self._parent(new).names[new.name] = self._parent(old).names.pop(old.name, _File())

    def _remove(self, kind: str, path: Any, dir_fd: int | None) -> None:
        target = self._resolve(path, dir_fd)
        if target is not None and os.path.lexists(target):
            self._change(kind, target)
        self._real[kind](path, dir_fd=dir_fd)
        if target is not None:
            self._parent(target).names.pop(target.name, None)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        target = self._resolve(path, dir_fd)
        if target is not None:
            self._change("mkdir", target)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        if target is not None:
            self._parent(target).names[target.name] = _Folder()

    def note_opening(self, path: Any, mode: Any) -> None:
        """Notes a file that `open` opens for writing. The lock of a run is one of these, and is empty."""
        if isinstance(path, str | bytes | os.PathLike) and isinstance(mode, str) and set(mode) & set("wax+"):
            target = self._resolve(path)
            if target is not None and target.name != "lock" and not target.is_dir():
                self.unwatched.append(str(target))


def _install_audit_hook() -> None:
    if not getattr(sys, "_disk_audit_hook", False):
        sys.addaudithook(lambda event, args: [d.note_opening(*args[:2]) for d in _disks] if event == "open" else None)
        sys._disk_audit_hook = True  # type: ignore[attr-defined]


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _read_node(path: Path) -> Any:
    if path.is_file():
        return _File(path.read_bytes())
    names = {child.name: _read_node(child) for child in path.iterdir()}
    return _Folder(names, dict(names))


def _write_durable(node: _File | _Folder, path: Path) -> None:
    if isinstance(node, _File):
        path.write_bytes(node.durable)
        return
    path.mkdir()
    for name, child in node.durable.items():
        _write_durable(child, path / name)


def preloaded_processes() -> Any:
    """Returns a context for processes that start with slow modules loaded, since loading them takes 5 s each time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["shoal.cli", "shoal.experiment.run", "shoal.methods", "sklearn.datasets", "torch._dynamo"]
    )
    return context


def digest(folder: Path) -> dict[str, bytes]:
    """Returns the content of all files that must be equal after a resumed and an undisturbed run."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {k: v for k, v in files.items() if k not in NOT_COMPARED}


@dataclass(frozen=True)
class Undisturbed:
    """A run without a stop: its files, and the changes at which it could be stopped."""

    files: dict[str, bytes]
    changes: list[str]


def run_undisturbed(job: Job) -> Undisturbed:
    """Runs the job without a stop. All that it writes is watched, and all of it survives a power cut."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "disk"
        folder.mkdir()
        disk = Disk(folder)
        with disk.watch():
            run_or_resume(job, folder / "run")
        disk.survivors(Path(name) / "after")
        files, surviving = digest(folder / "run"), digest(Path(name) / "after/run")
        not_durable = sorted(k for k, data in files.items() if surviving.get(k) != data)
        if disk.unwatched or not_durable:
            raise AssertionError(f"not watched: {disk.unwatched}; not forced to the disk: {not_durable}")
        return Undisturbed(files, disk.changes)


def problem_after(job: Job, expected: Undisturbed, stop_at: int, way: Way) -> str | None:
    """Stops a run at a change, resumes it, and returns what is wrong with the result, or None."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "disk"
        folder.mkdir()
        disk = Disk(folder, stop_at)
        completed = _rounds_until_stopped(job, disk)
        if way == "power cut":
            disk.survivors(Path(name) / "after")
            folder = Path(name) / "after"
        return _problem_of_resuming(job, folder, expected, completed)


def problem_after_stopped_resume(job: Job, expected: Undisturbed, first_stop: int, stop_at: int) -> str | None:
    """Stops a run at a change, stops its resumption at a change, and resumes it again.

    Returns what is wrong with the result, or None. An IndexError says that the resumption has fewer changes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        completed = _rounds_until_stopped(job, Disk(folder, first_stop))
        second = Disk(folder, stop_at)
        second.adopt()
        completed += _rounds_until_stopped(job, second)
        if not second.has_stopped:
            raise IndexError(f"a resumption has {len(second.changes)} changes, not {stop_at}")
        return _problem_of_resuming(job, folder, expected, completed)


def _rounds_until_stopped(job: Job, disk: Disk) -> list[int]:
    """Runs or resumes the job until the disk stops it, and returns the rounds that were complete."""
    completed: list[int] = []
    with disk.watch(), suppress(Stopped):
        run_or_resume(job, disk.folder / "run", on_round=lambda record: completed.append(record.round))
    return completed


def _problem_of_resuming(job: Job, folder: Path, expected: Undisturbed, completed: list[int]) -> str | None:
    again: list[int] = []
    try:
        run_or_resume(job, folder / "run", on_round=lambda record: again.append(record.round))
    except Exception as error:  # any error is a run that is lost
        return f"it cannot be resumed: {type(error).__name__}: {error}"
    if completed and again and again[0] <= completed[-1]:
        return f"round {again[0]} ran again, but round {completed[-1]} was complete"
    files = digest(folder / "run")
    if files != expected.files:
        names = sorted(k for k in files.keys() | expected.files.keys() if files.get(k) != expected.files.get(k))
        return f"it has other bytes in {', '.join(names)}"
    others = sorted(p.name for p in folder.iterdir() if p.name != "run")
    return f"it left {', '.join(others)}" if others else None
