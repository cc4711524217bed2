"""Files that a command writes to a path of the user's choice.

A command replaces a file that shoal wrote. Any other file is replaced only with --force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UserError
from shoal.store.atomic_files import check_writable, write_bytes


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that shoal writes.

    Parameters
    ----------
    name : str
        Name in error messages, with its article.
    ending : str
        The ending that every file of this kind has.
    is_own : callable
        Returns from the content of an existing file whether shoal wrote it as a file of this kind.
    """

    name: str
    ending: str
    is_own: Callable[[Path], bool]


def begins_with(mark: str, within_bytes: int = 4096) -> Callable[[Path], bool]:
    """Returns a test for `OutputKind`: whether the first bytes of a file contain `mark`."""

    def is_own(path: Path) -> bool:
        with path.open("rb") as file:
            return mark.encode() in file.read(within_bytes)

    return is_own


def check_output(path: Path, kind: OutputKind, force: bool = False) -> None:
    """Raises a UserError for a path that shoal may not or cannot write. A command can check this before hours of work.

    Parameters
    ----------
    path : Path
        The file to write.
    kind : OutputKind
        The kind of file.
    force : bool
        Permit replacing a file that shoal did not write.

    Raises
    ------
    UserError
        If the path is a folder, has another ending, or cannot be written; without `force` also if it is a file that
        shoal did not write.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder. Choose the name of a file, such as {path / f'page{kind.ending}'}.")
    if path.suffix.lower() != kind.ending:
        raise UserError(f"{path} is no name for {kind.name}, which must end in {kind.ending}. Choose a name that does.")
    check_writable(path)
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{path} is not an ordinary file. Choose another name.")
    if not force and not kind.is_own(path):
        raise UserError(
            f"{path} exists ({path.stat().st_size:,} bytes), and shoal did not write it. Move it away, choose another "
            "name, or replace it with --force."
        )


def write_output(path: Path, data: bytes, kind: OutputKind, force: bool = False) -> None:
    """Writes the file, after checking the path again, since it may have changed during a long command."""
    check_output(path, kind, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
