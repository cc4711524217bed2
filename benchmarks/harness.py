"""Code for all benchmarks: the options --tiny and --out, the facts of a run, result files, and child processes.

A result file names the commit and whether the tree had other changes, the machine, the options, and the date and the
load average at the start and at the end. It is written under a temporary name and renamed, so that it is never
half-written. This module imports neither torch nor shoal, so that a script that only starts other processes stays
small.
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
    """A run of a benchmark: the path of its result, and the facts at its start."""

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
    """Adds --tiny and --out to the command line, reads it, and collects the facts of the run.

    Without --out only a run with the default options writes to `benchmarks/results`, so that a tiny or a partial run
    never replaces a stored result.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser with the options of the benchmark.
    result : str
        Name of the file in `benchmarks/results` that a full run writes.
    tiny : Mapping[str, Any]
        Defaults of the options in the tiny form.
    inputs : Sequence[str]
        Names of the arguments that are paths of what to measure. They are not recorded.

    Returns
    -------
    tuple[argparse.Namespace, Run]
        The options, and the run that writes the result.
    """
    parser.add_argument("--tiny", action="store_true", help="Run a small form, which takes seconds. Needs --out.")
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


def parse_positive(text: str) -> int:
    """Reads a whole number of 1 or more, as a type of arguments."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parse_seconds(text: str) -> float:
    """Reads a number of seconds above 0, as a type of arguments."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def call(main: Callable[[], int | None]) -> NoReturn:
    """Runs a benchmark and ends the process. A user error prints one sentence and gives exit code 2, as in shoal."""
    from shoal import UserError

    try:
        sys.exit(main())
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def problem_with(out: Path | None, is_tiny: bool, changed: Sequence[str]) -> str | None:
    """Returns why the result cannot be written to this file, or None. It is called before anything is measured."""
    if out is None:
        if is_tiny:
            return "--tiny needs --out FILE, because a tiny run does not replace a stored result."
        if changed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            return f"{names} is not at its default, so --out FILE is needed: only a full run replaces a stored result."
        return None
    if is_tiny and out.resolve().is_relative_to(RESULTS):
        return f"--out is {out}, but a tiny run does not write to the stored results. Name a file in another folder."
    if out.is_dir():
        return f"--out is {out}, which is a folder. Name a file."
    if not out.resolve().parent.is_dir():
        return f"--out is {out}, but its folder does not exist. Create the folder first."
    return None


def commit_facts() -> dict[str, Any]:
    """Returns the commit, and whether other files than results differ from it. Both are None without a git checkout."""
    commit = _git("rev-parse", "HEAD")
    # A replaced result of another benchmark does not change what is measured.
    changes = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None  # git is not installed
    return None if process.returncode else process.stdout.strip()


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
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
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
    """Lets `write` fill a temporary file, which is then renamed to this path."""
    temporary_path = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary_path)
        with temporary_path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)


def without_infinities(value: Any) -> Any:
    """Returns the value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {k: without_infinities(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Outcome:
    """How a child process ended: its status, the reason if the status is not "ok", and its output."""

    status: str
    reason: str | None = None
    output: str = ""

    @property
    def row(self) -> dict[str, str | None]:
        """The cells of a row of results that say how its measurement ended."""
        return {"status": self.status, "reason": self.reason}


def missing(modules: Iterable[str], advice: str) -> Outcome | None:
    """Returns the outcome of a program if a module that it needs is not installed, else None."""
    absent = [m for m in modules if find_spec(m) is None]
    return Outcome(NOT_INSTALLED, f"{', '.join(absent)} is not installed: {advice}") if absent else None


def run_process(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs a program and returns how it ended. No failure of the program is raised.

    The program gets its own session. If it does not end in time, or if this process is interrupted, the program and
    all processes that it started are ended.
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
    cause = f": {last_words(errors)}" if last_words(errors) else ""
    if process.returncode < 0:
        return Outcome(CRASHED, f"ended by {signal_name(-process.returncode)}{cause}", output)
    return Outcome(FAILED, f"exit code {process.returncode}{cause}", output)


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends the process and all processes of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGABRT."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """Returns at most 300 characters of the last line that has a letter."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    return next((line[:300] for line in reversed(lines) if re.search(r"[A-Za-z]", line)), "")
