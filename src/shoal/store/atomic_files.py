"""Files that are never half-written: the content is written to a temporary file, which is then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from shoal.errors import UserError


def check_writable(path: Path) -> None:
    """Raises a UserError if nothing can be created at this path. The test writes a file that never gets a name."""
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir():
        raise UserError(f"{path} cannot be written: {parent} is a file.")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {parent}: {error.strerror}.") from None


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary_path.write_bytes(data)
        os.replace(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)


def json_bytes(value: Any) -> bytes:
    """Returns the value as JSON with sorted keys."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file completely or not at all."""
    write_bytes(path, json_bytes(value))


def append_line(path: Path, value: Any) -> None:
    """Appends the value as one line of JSON."""
    with path.open("a") as f:
        f.write(json.dumps(value, sort_keys=True, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a JSON lines file. A killed process may have cut the last line short."""
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
    """Replaces all lines of a JSON lines file."""
    write_bytes(path, "".join(json.dumps(x, sort_keys=True) + "\n" for x in lines).encode())
