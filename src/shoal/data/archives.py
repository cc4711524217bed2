"""The members that are needed out of a tar.gz or zip, all or none."""

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
    """Write the members into `folder` under their last names: no path of the archive's own is ever used."""
    beside = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    try:
        with _open_archive(archive) as open_member:
            for member in members:
                with open_member(member) as source, (beside / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        shutil.rmtree(folder, ignore_errors=True)
        beside.chmod(0o755)
        beside.rename(folder)
    except KeyError as error:
        raise UserError(f"{archive}: not in this archive: {error.args[0]}") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{archive}: damaged archive: {error}") from error
    except OSError as error:
        raise UserError(f"{archive}: cannot be unpacked into {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
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
    """Never a link: it could name a file outside."""
    info = tar.getmember(member)
    file = tar.extractfile(info) if info.isreg() else None
    if file is None:
        raise KeyError(f"{member} as a regular file")
    return file
