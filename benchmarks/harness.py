"""What all benchmarks share: the options --tiny and --out, the facts of a run, result files, and child processes.

A result file names the commit and whether the tree had other changes, the machine, the options, and the date and the
load average at the start and at the end. It is written beside its path and renamed, so that it is never half-written.
This module imports neither torch nor shoal: a script that only starts other processes stays small.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

OK, FAILED, CRASHED, TIMED_OUT, NOT_INSTALLED = "ok", "failed", "crashed", "timed out", "not installed"


@dataclass(frozen=True)
class Run:
    """One run of a benchmark: where its result goes, and what was known when it started."""

    out: Path
    facts: Mapping[str, Any]
    started: Mapping[str, Any]

    def write(self, **results: Any) -> None:
        """Writes the facts of the run and these results."""
        value = {**self.facts, "started": self.started, "ended": moment(), **results}
        text = json.dumps(without_infinities(value), indent=1, allow_nan=False)
        write_atomically(self.out, lambda path: path.write_text(text + "\n"))
        print(f"written: {self.out}", file=sys.stderr)


def begin(
    parser: argparse.ArgumentParser, result: str, tiny: Mapping[str, Any], inputs: Sequence[str] = ()
) -> tuple[argparse.Namespace, Run]:
    """Reads the command line, to which it adds --tiny and --out, and notes the facts of the run.

    Only a run with the default options writes to `benchmarks/results` without being told to, so that a tiny or a
    partial run never replaces a kept result.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser with the options of the benchmark.
    result : str
        Name of the file in `benchmarks/results` that a full run writes.
    tiny : Mapping[str, Any]
        Defaults of the options in the tiny form.
    inputs : Sequence[str]
        Names of the arguments that say what to measure. They are paths, and are not recorded.

    Returns
    -------
    tuple[argparse.Namespace, Run]
        The options, and the run that writes the result.
    """
    parser.add_argument("--tiny", action="store_true", help="Run a form that takes seconds. Needs --out.")
    parser.add_argument("--out", type=Path, help=f"Write the result to this file. Default: results/{result}.")
    full = vars(parser.parse_args([]))
    options = parser.parse_args()
    if options.tiny:
        parser.set_defaults(**tiny)
        options = parser.parse_args()
    recorded = {k: v for k, v in vars(options).items() if k not in ("tiny", "out", *inputs)}
    changed = [k for k, v in recorded.items() if v != full[k]]
    if problem := problem_with(options.out, options.tiny, changed):
        parser.error(problem)
    facts = {"benchmark": Path(sys.argv[0]).stem, "tiny": options.tiny, "options": recorded}
    facts |= {**commit_facts(), "machine": machine_facts()}
    return options, Run(options.out or RESULTS / result, facts, moment())


def positive(text: str) -> int:
    """Reads a whole number of 1 or more: a type of arguments."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """Reads a number of seconds above 0: a type of arguments."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def call(main: Callable[[], int | None]) -> NoReturn:
    """Runs a benchmark and ends the process. Bad input is one sentence and exit code 2, as on shoal's command line."""
    from shoal import UserError

    try:
        sys.exit(main())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def problem_with(out: Path | None, is_tiny: bool, changed: Sequence[str]) -> str | None:
    """Returns why the result cannot go to this file, or None. It is asked before anything is measured."""
    if out is None:
        if is_tiny:
            return "--tiny needs --out FILE: a tiny run does not replace a kept result"
        if changed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            return f"{names} is not at its default, so --out FILE is needed: only a full run replaces a kept result"
        return None
    if is_tiny and out.resolve().is_relative_to(RESULTS):
        return f"--out is {out}, but a tiny run does not write to the kept results: name a file in another folder"
    if out.is_dir():
        return f"--out is {out}, which is a folder: name a file"
    if not out.resolve().parent.is_dir():
        return f"--out is {out}, but its folder does not exist: create the folder first"
    return None


def commit_facts() -> dict[str, Any]:
    """Returns the commit, and whether other files than results differ from it; None where this is no git checkout."""
    commit = _git("rev-parse", "HEAD")
    # A benchmark that ran just before may have replaced its result: that does not change what is measured.
    changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None  # git is not installed
    return None if done.returncode else done.stdout.strip()


def machine_facts() -> dict[str, Any]:
    """Returns the processor, the usable cores, the memory, and the versions of Python and PyTorch."""
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": version_of("torch"),
    }


def cpu_name() -> str:
    """Returns the model name of the processor; `platform.processor` is empty on most Linux systems."""
    with suppress(OSError):
        if named := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return named[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def moment() -> dict[str, Any]:
    """Returns the date, and the load averages of the last 1, 5 and 15 minutes."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside this path, which then takes the path's place."""
    beside = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def without_infinities(value: Any) -> Any:
    """Returns the value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {k: without_infinities(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Outcome:
    """How a child process ended: a status, the reason unless it is "ok", and what was printed."""

    status: str
    reason: str | None = None
    output: str = ""

    @property
    def row(self) -> dict[str, str | None]:
        """The part of a row of results that says how its measurement ended."""
        return {"status": self.status, "reason": self.reason}


def missing(modules: Iterable[str], advice: str) -> Outcome | None:
    """Returns the outcome of a program that needs a module which is not installed, or None."""
    absent = [m for m in modules if find_spec(m) is None]
    return Outcome(NOT_INSTALLED, f"{', '.join(absent)} is not installed: {advice}") if absent else None


def run_process(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs a program and returns how it ended. No failure of the program is raised.

    The program gets a session of its own. Whatever it has started is ended with it when it does not end in time, and
    when this process is interrupted.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    try:
        process = subprocess.Popen(command, env=os.environ | (env or {}), start_new_session=True, **pipes)
    except OSError as error:
        return Outcome(FAILED, f"{command[0]} cannot be started: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Outcome(TIMED_OUT, f"did not end within {timeout_s:g} s")
    except BaseException:
        _kill(process)
        raise
    if process.returncode == 0:
        return Outcome(OK, output=output)
    print(errors[-3000:], file=sys.stderr, end="")
    said = f": {last_words(errors)}" if last_words(errors) else ""
    if process.returncode < 0:
        return Outcome(CRASHED, f"ended by {signal_name(-process.returncode)}{said}", output)
    return Outcome(FAILED, f"exit code {process.returncode}{said}", output)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends the process and all of its session that stayed in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def signal_name(number: int) -> str:
    """Returns for example SIGABRT."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """Returns the last line that has a word in it, at most 300 characters of it."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    return next((line[:300] for line in reversed(lines) if re.search(r"[A-Za-z]", line)), "")
