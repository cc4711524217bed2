"""Runs several benchmarks one after the other, for `make bench`. A benchmark that fails does not end the others.

At the end it prints which benchmarks failed, and its exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from harness import HERE, signal_name

DEFAULT_BENCHMARKS = ("compare", "fleets", "scale", "clusters", "serve")  # what `make bench` runs
OTHER_BENCHMARKS = ("bandit", "contribution", "density", "durability", "fuzz", "gate", "leakage", "unseen")


def run(name: str, tiny_out: Path | None) -> str | None:
    """Runs a benchmark and returns how it failed, or None."""
    tiny = [] if tiny_out is None else ["--tiny", "--out", str(tiny_out / f"{name}.json")]
    code = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *tiny], check=False).returncode
    if code < 0:
        return f"ended by {signal_name(-code)}"
    return f"exit code {code}" if code else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"Benchmarks to run. Default: {' '.join(DEFAULT_BENCHMARKS)}."
    )
    parser.add_argument("--tiny", action="store_true", help="Run the tiny forms. Needs --out.")
    parser.add_argument("--out", type=Path, help="Write the results of the tiny forms to this folder.")
    options = parser.parse_args()
    for name in options.names:
        if name not in DEFAULT_BENCHMARKS + OTHER_BENCHMARKS:
            parser.error(
                f"{name!r} is not a benchmark; it must be one of {', '.join(DEFAULT_BENCHMARKS + OTHER_BENCHMARKS)}"
            )
    if options.tiny != (options.out is not None) or (options.tiny and not options.out.is_dir()):
        parser.error(f"--out is {options.out}; it must be an existing folder, and needs --tiny.")
    lines, has_failed = [], False
    for name in options.names or DEFAULT_BENCHMARKS:
        print(f"== {name}", file=sys.stderr, flush=True)
        start_s = time.monotonic()
        failure = run(name, options.out)
        has_failed |= failure is not None
        lines.append(f"{name:13} {time.monotonic() - start_s:7.1f} s  {failure or 'ok'}")
    print("\n".join(["== summary", *lines]), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
