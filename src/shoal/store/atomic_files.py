"""Files that are never half-written, and that are on the disk when the function that writes them returns.

- The content of a file is written to a temporary file and forced to the disk. The temporary file is then renamed, and
  its folder is forced to the disk, because the name is in the folder.
- Lines are added to a file in one piece. If that fails, the file has its earlier length again.
- All changes are calls of `os`, so that a test can stop a run at every one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to the disk."""
    with _naming_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates a folder and the folders above it as far as they do not exist, and forces their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process may create the same folder
            os.mkdir(path)
        sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Writes a file and forces its content to the disk, but not its name.

    A crash can leave a part of the file, so that it is only for files that get their final name later.
    """
    with _naming_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all, and forces it to the disk."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(temporary_path, data)
        os.replace(temporary_path, path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_folder(folder: Path, files: Mapping[str, bytes], temporary_folder: Path) -> None:
    """Writes a folder with files completely or not at all, and forces it to the disk.

    Parameters
    ----------
    folder : Path
        The folder to write. An existing one is replaced.
    files : Mapping
        Content of each file by its name.
    temporary_folder : Path
        A name beside `folder` under which the files are written first.
    """
    shutil.rmtree(temporary_folder, ignore_errors=True)
    make_folder(temporary_folder)
    try:
        for name, data in files.items():
            write_file(temporary_folder / name, data)
        sync_folder(temporary_folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary_folder, folder)
    except BaseException:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    """Adds the path to errors of the operating system that do not have one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def json_bytes(value: Any) -> bytes:
    """Returns the value as JSON with sorted keys."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file completely or not at all."""
    write_bytes(path, json_bytes(value))


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Appends each value as a line of JSON and forces the lines to the disk. If that fails, none of them is added."""
    data = "".join(json.dumps(x, sort_keys=True, allow_nan=False) + "\n" for x in values).encode()
    is_new = not path.exists()
    with _naming_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            old_bytes = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, old_bytes)
                raise
        finally:
            os.close(descriptor)
    if is_new:
        sync_folder(path.parent)


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
    """Replaces all lines of a JSON lines file, unless it has exactly these lines."""
    data = "".join(json.dumps(x, sort_keys=True) + "\n" for x in lines).encode()
    if not path.exists() or path.read_bytes() != data:
        write_bytes(path, data)
