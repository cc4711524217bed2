"""Files that a command writes where the user says: shoal replaces what it wrote itself, and nothing else unasked."""

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
        What error messages call it, with its article.
    ending : str
        The ending that every file of this kind has.
    is_own : callable
        Tells from the content of an existing file whether shoal wrote it as a file of this kind.
    """

    name: str
    ending: str
    is_own: Callable[[Path], bool]


def begins_with(mark: str, within_bytes: int = 4096) -> Callable[[Path], bool]:
    """Returns a test for `OutputKind`: whether `mark` stands in the first bytes of a file."""

    def is_own(path: Path) -> bool:
        with path.open("rb") as file:
            return mark.encode() in file.read(within_bytes)

    return is_own


def check_output(path: Path, kind: OutputKind, force: bool = False) -> None:
    """Refuses a path that shoal may not or cannot write, so that a command can ask before hours of work.

    Raises
    ------
    UserError
        If the path is a folder, has another ending, lies where nothing can be written, or is a file that shoal did
        not write. `force` permits the last of these only.
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
    """Writes a whole file, after a last look at what is there now."""
    check_output(path, kind, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
