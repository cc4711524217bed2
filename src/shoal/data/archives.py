"""Unpacks the needed members of a tar.gz or zip file, all or none."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from shoal.errors import UserError


def unpack(archive: Path, members: Sequence[str], folder: Path) -> Path:
    """Writes the members into `folder` under their file names, because a path in an archive cannot be trusted."""
    temporary_folder = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    try:
        with _open_archive(archive) as open_member:
            for member in members:
                with open_member(member) as source, (temporary_folder / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        shutil.rmtree(folder, ignore_errors=True)
        temporary_folder.chmod(0o755)
        temporary_folder.rename(folder)
    except KeyError as error:
        raise UserError(f"{archive}: a needed file is missing in this archive: {error.args[0]}.") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{archive}: damaged archive: {error}.") from error
    except OSError as error:
        raise UserError(f"{archive}: cannot be unpacked into {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return folder


@contextmanager
def _open_archive(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            yield zipped.open
    else:
        with tarfile.open(archive) as tar:
            yield partial(_open_regular, tar)


def _open_regular(tar: tarfile.TarFile, member: str) -> IO[bytes]:
    """Opens a regular file, and never a link, which could name a file outside of the archive."""
    info = tar.getmember(member)
    file = tar.extractfile(info) if info.isreg() else None
    if file is None:
        raise KeyError(f"{member} is not a regular file")
    return file
