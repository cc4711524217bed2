"""Files that are never half-written: everything is written beside its place and renamed into it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from shoal.errors import UserError


def check_writable(path: Path) -> None:
    """Refuses a path below which nothing can be created. The test is a file that never gets a name."""
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir():
        raise UserError(f"{path} cannot be written: {above} is a file.")
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {above}: {error.strerror}.") from None


def write_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, json_bytes(value))


def append_line(path: Path, value: Any) -> None:
    with path.open("a") as f:
        f.write(json.dumps(value, sort_keys=True, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file whose last one may be cut short."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def rewrite_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    write_bytes(path, "".join(json.dumps(x, sort_keys=True) + "\n" for x in lines).encode())
