"""Text in files of users: read as UTF-8 or UTF-16, or refused with line and byte."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from shoal.errors import UserError, shorten

_HEAD_BYTES = 2**16  # longer than any line of column names
_ADVICE = "Save the file as UTF-8; Excel calls it 'CSV UTF-8'."


def open_utf8(path: Path) -> BinaryIO:
    """Opens a text file as UTF-8. UTF-16 is recognised by its byte order mark, which Excel writes, and converted."""
    with path.open("rb") as file:
        mark = file.read(2)
    if mark not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return path.open("rb")
    try:
        return io.BytesIO(path.read_bytes().decode("utf-16").encode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: starts as UTF-16, but it is not UTF-16: {error.reason} at byte {error.start + 1}. {_ADVICE}"
        ) from None


def detect_separator(file: BinaryIO) -> str:
    """Returns the separator of columns: a tab if the first line has tabs and no comma, else a comma."""
    head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
    file.seek(0)
    names = head.replace(b"\r", b"\n").partition(b"\n")[0]
    return "\t" if b"\t" in names and b"," not in names else ","


def refuse_non_utf8(path: Path) -> None:
    """Raises an error that names the first byte that is not UTF-8 text, if there is one."""
    with open_utf8(path) as file:
        for number, line in enumerate(file, start=1):
            zero = line.find(0)
            if zero >= 0:
                raise UserError(
                    f"{path}, line {number}, byte {zero + 1}: 0x00 is not text. Save the file as UTF-8 (UTF-16 needs a "
                    "byte order mark)."
                )
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start : error.start + 1]
                letter = byte.decode("cp1252", "ignore")
                hint = f" (in Windows-1252 it is {letter!r})" if letter else ""
                problem = f"0x{byte.hex().upper()} is not UTF-8{hint}"
                raise UserError(f"{path}, line {number}, byte {error.start + 1}: {problem}. {_ADVICE}") from None


def join_names(names: Iterable[str]) -> str:
    """Returns the names, joined by commas and shortened."""
    return shorten(", ".join(names))
