"""Fuzzes the reader of messages (`shoal.codec`) guided by coverage, and checks that planted faults are found.

A client may send any bytes, so `decode_task`, `decode_report` and `unpack` must return a value or raise a UserError.
The fuzzer changes correct messages, keeps a change if it reaches new code, and stops at any other exception. The engine
`atheris` uses libFuzzer (`pip install atheris`). The engine `lines` needs nothing: it keeps an input if it reaches new
lines. Each planted fault removes one check in a copy of shoal. Writes `results/fuzz.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import harness

ROOT = harness.HERE.parent
FILES = ("codec.py", "tree.py")
READERS = (
    "unpack",
    "decode_task",
    "decode_report",
    "unflatten",
    "_require",
    "_subtree",
    "_numbers_of",
    "_named",
    "_is_unicode",
)
FAULTS = {  # name -> file, the check, and what replaces it
    "types of numbers": (
        "codec.py",
        '_require(is_valid, f"{key!r} must be a tensor',
        '_require(True, f"{key!r} must be a tensor',
    ),
    "number of names": ("codec.py", "len(names) == len(set(names)) == len(values)", "len(values) >= 0"),
    "tensor or tree": ("tree.py", "if not isinstance(node, dict):", "if False:"),
    "damaged bytes": (
        "codec.py",
        "except Exception as error:  # safetensors",
        "except ValueError as error:  # safetensors",
    ),
}


def seeds() -> list[bytes]:
    """Returns correct messages: a task, a task with cached models, a report, and empty ones."""
    import torch

    from shoal.codec import encode_report, encode_task, pack
    from shoal.types import Report, Task

    model = {"w": torch.arange(2.0), "n": torch.tensor(4)}
    return [
        encode_task(Task({"g": model}, {"lr": 0.1}, seed=3)),
        encode_task(Task({"g": model}, {}, 3, digests={"g": 7}, cached=frozenset({"g"}))),
        encode_report(Report({"m": model}, {"loss": (1.0, 2.0)}, {"train": 3}, 10)),
        encode_report(Report()),
        encode_task(Task()),
        pack({"a": {"b": torch.ones(1)}, "c": torch.ones(1)}, None),
    ]


def read(data: bytes) -> None:
    """Reads bytes as every kind of message. Any exception but a UserError is a finding."""
    from shoal import codec

    for reader in (codec.unpack, codec.decode_task, codec.decode_report):
        with suppress(codec.UserError, codec.MissingModel):
            reader(data)


WORDS = (
    *(
        b'"a"',
        b'"a/b"',
        b'"seed"',
        b'"config"',
        b'"flops"',
        b'"counts"',
        b'"metrics"',
        b'"models"',
        b'"digests"',
        b'"F64"',
    ),
    *(
        b'"I64"',
        b'"F32"',
        b'"BOOL"',
        b"[]",
        b"[1]",
        b"[0]",
        b"[2]",
        b"[[],[]]",
        b"null",
        b"[0,8]",
        b"%61",
        b"/",
        b"\\ud800",
    ),
)


PARTS = (rb'"(?:[^"\\]|\\.)*"', rb"\[[^\[\]]*\]", rb"\d+")  # a text, a list, a number


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a changed message. Its length and the ends of its tensors are usually made to fit again."""
    size = int.from_bytes(data[:8], "little")
    header, payload = bytearray(data[8 : 8 + size]), data[8 + size :]
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(header) + 1)
        match rng.randrange(4):
            case 0:
                header[start : start + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 2))
            case 1:
                header[start : start + rng.randint(0, 8)] = rng.choice(WORDS)
            case _:  # a whole name, type, shape or number becomes another one
                spans = [m.span() for m in re.finditer(rng.choice(PARTS), header)]
                if spans:
                    first, last = rng.choice(spans)
                    header[first:last] = rng.choice(
                        (*WORDS, str(rng.randrange(4)).encode(), bytes(header[slice(*rng.choice(spans))]))
                    )
    length = len(header) if rng.random() < 0.95 else rng.choice((0, 10 * 2**30, 2**64 - 1, len(header) + 1))
    return length.to_bytes(8, "little") + bytes(header) + payload


# --- Coverage ---------------------------------------------------------------------------------------------------------


class Lines:
    """The lines of the readers that have been executed."""

    def __init__(self) -> None:
        import shoal

        folder = Path(shoal.__file__).parent
        self.paths = {str(folder / name): name for name in FILES}
        self.executed: set[tuple[str, int]] = set()
        self.all = {(name, line) for path, name in self.paths.items() for line in _lines_of_readers(Path(path))}

    def run(self, data: bytes) -> bool:
        """Reads the bytes, and returns whether new lines were executed."""
        before = len(self.executed)
        sys.settrace(self._trace)
        try:
            read(data)
        finally:
            sys.settrace(None)
        return len(self.executed & self.all) > 0 and len(self.executed) > before

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        name = self.paths.get(frame.f_code.co_filename)
        if name is None:
            return None
        self.executed.add((name, frame.f_lineno))
        return self._trace

    def summary(self) -> dict[str, Any]:
        """Returns how many lines of the readers were executed, and which were not."""
        missed = sorted(self.all - self.executed)
        return {
            "lines": len(self.all),
            "covered_lines": len(self.all) - len(missed),
            "missed": [f"{name}:{line}" for name, line in missed],
        }


def _lines_of_readers(path: Path) -> set[int]:
    def nested(code: CodeType) -> list[CodeType]:
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        return [code, *(found for c in inner for found in nested(c))]

    module = compile(path.read_text(), str(path), "exec")
    functions = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name in READERS]
    codes = [code for function in functions for code in nested(function)]
    return {line for code in codes for _, _, line in code.co_lines() if line and line != code.co_firstlineno}


# --- The engines, in a process of their own ---------------------------------------------------------------------------


def fuzz_lines(folder: Path, executions: int, seed: int) -> None:
    """Fuzzes with the built-in engine, and writes what it found to the folder."""
    rng, lines, corpus, done, finding = random.Random(seed), Lines(), seeds(), 0, None
    data = b""
    try:
        for data in corpus:
            lines.run(data)
        while done < executions:
            done += 1
            data = mutate(rng.choice(corpus), rng)
            if lines.run(data):
                corpus.append(data)
    except Exception as error:
        finding = f"{type(error).__name__}: {error}"[:200]
        (folder / "finding.bin").write_bytes(data)
    result = {"executions": done, "finding": finding, "corpus": len(corpus), **lines.summary()}
    (folder / "result.json").write_text(json.dumps(result))


def fuzz_atheris(folder: Path, executions: int, seed: int) -> None:
    """Fuzzes with atheris, whose process ends in libFuzzer. Its corpus and its findings are files of the folder."""
    import atheris

    with atheris.instrument_imports(include=["shoal.codec", "shoal.tree"]):
        import shoal.codec  # noqa: F401

    os.dup2(os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT), 2)  # libFuzzer reports to the standard error
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(data)

    def run(data: bytes) -> None:
        try:
            read(data)
        except Exception as error:
            (folder / "finding.txt").write_text(f"{type(error).__name__}: {error}"[:200])
            raise

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = mutate(data, rng) if rng.random() < 0.8 else atheris.Mutate(data, max_size)
        return changed[:max_size]

    flags = [
        f"-runs={executions}",
        f"-seed={seed + 1}",
        "-max_len=4096",
        "-mutate_depth=1",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], run, custom_mutator=change)
    atheris.Fuzz()


def run_engine(engine: str, executions: int, seed: int, source: Path, timeout_s: float) -> dict[str, Any]:
    """Fuzzes the shoal of a source folder in a process, and returns what it did and found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--engine", engine]
        command += ["--executions", str(executions), "--seed", str(seed)]
        paths = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        start_s = time.monotonic()
        outcome = harness.run_process(command, timeout_s, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        seconds = time.monotonic() - start_s
        if engine == "lines":
            if outcome.status != harness.OK:
                raise SystemExit(f"the fuzzer did not end: {outcome.reason}")
            result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        else:
            result = _result_of_atheris(folder)
    return {"seconds": round(seconds, 2), **result}


def _result_of_atheris(folder: Path) -> dict[str, Any]:
    output = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
    finding = (folder / "finding.txt").read_text() if (folder / "finding.txt").exists() else None
    executions = re.search(r"number_of_executed_units:\s*(\d+)", output)
    if executions is None and finding is None:
        raise SystemExit(f"atheris did not run: {output[-500:]}")
    runs = re.findall(r"^#(\d+)", output, re.MULTILINE)
    num_executions = int(executions[1]) if executions else max(map(int, runs), default=0)
    result = {"executions": num_executions, "finding": finding, "corpus": len(list((folder / "corpus").iterdir()))}
    if finding is None:
        lines = Lines()
        for path in sorted((folder / "corpus").iterdir()):
            lines.run(path.read_bytes())
        result |= lines.summary()
    return result


def plant(fault: str, folder: Path) -> Path:
    """Returns a source folder with a copy of shoal that lacks one check."""
    name, check, replacement = FAULTS[fault]
    source = folder / fault.replace(" ", "-")
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
    path = source / "shoal" / name
    text = path.read_text()
    assert text.count(check) == 1, f"{name} has the check {check!r} {text.count(check)} times"
    path.write_text(text.replace(check, replacement))
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, harness.parse_positive
    add("--engine", default="atheris", choices=["atheris", "lines"], help="Engine of the fuzzer. Default: atheris.")
    add("--executions", type=positive, default=200_000, help="Executions without a planted fault. Default: 200000.")
    add("--fault-executions", type=positive, default=50_000, help="Most executions for each fault. Default: 50000.")
    add("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="Faults to plant. Default: all.")
    add("--seed", type=int, default=0, help="Seed of the changes. Default: 0.")
    add("--timeout-s", type=harness.parse_seconds, default=900.0, help="Limit of one run of the fuzzer. Default: 900.")
    if "--child" in sys.argv:
        add("--child", type=Path)
        options = parser.parse_args()
        run = {"lines": fuzz_lines, "atheris": fuzz_atheris}[options.engine]
        run(options.child, options.executions, options.seed)
        return 0
    tiny = {"engine": "lines", "executions": 300, "fault_executions": 5000, "faults": ["number of names"]}
    options, run = harness.begin(parser, "fuzz.json", tiny)
    if options.engine == "atheris" and (absent := harness.missing(["atheris"], "install it, or use --engine lines")):
        parser.error(f"--engine is atheris, but {absent.reason}.")
    common = options.engine, options.seed
    clean = run_engine(common[0], options.executions, common[1], ROOT / "src", options.timeout_s)
    covered = f"{clean.get('covered_lines')} of {clean.get('lines')} lines"
    print(f"{clean['executions']} executions, {covered}, finding: {clean['finding']}")
    planted = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in options.faults:
            result = run_engine(
                common[0], options.fault_executions, common[1], plant(fault, Path(folder)), options.timeout_s
            )
            keys = ("seconds", "executions", "finding")
            planted.append({"fault": fault, "is_found": result["finding"] is not None, **{k: result[k] for k in keys}})
            print(f"fault {fault!r}: {result['finding'] or 'not found'} after {result['executions']} executions")
    run.write(clean=clean, planted=planted)
    return int(clean["finding"] is not None or not all(row["is_found"] for row in planted))


if __name__ == "__main__":
    harness.call(main)
