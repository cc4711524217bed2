"""Downloads a file over HTTP. A download can resume, and the file gets its name after its checksum matched."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import httpx

from shoal.data.dataset import Progress
from shoal.errors import UserError

_TIMEOUT_S = 30.0
_BUSY_STATUSES = {408, 425, 429}


class _TransientError(Exception):
    """An error after which another attempt may succeed."""


def fetch(
    url: str,
    path: Path,
    sha256: str,
    size_bytes: int | None = None,
    progress: Progress | None = None,
    *,
    num_attempts: int = 4,
    backoff_s: float = 1.0,
) -> Path:
    """Downloads a file.

    Parameters
    ----------
    url : str
        Address of the file.
    path : Path
        The file to write. The bytes of an interrupted download are in `path.part`, from which the next call resumes.
    sha256 : str
        Checksum of the file.
    size_bytes : int or None
        Size of the file, if it is known.
    progress : callable or None
        Called with the name of the file, the bytes so far, and the bytes in all.
    num_attempts : int
        Number of attempts.
    backoff_s : float
        Seconds before the second attempt. They double with every further attempt.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    UserError
        If the file cannot be downloaded or written, or has another checksum.
    """
    part = path.with_name(path.name + ".part")
    try:
        _try_repeatedly(url, part, path, size_bytes, progress, num_attempts, backoff_s)
        _check_checksum(part, path, sha256)
        os.replace(part, path)
    except OSError as error:
        raise UserError(_disk_error_text(error, url, path, size_bytes)) from error
    return path


def _try_repeatedly(
    url: str,
    part: Path,
    path: Path,
    size_bytes: int | None,
    progress: Progress | None,
    num_attempts: int,
    backoff_s: float,
) -> None:
    last_error = ""
    for attempt in range(num_attempts):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            return _download_rest(url, part, path.name, size_bytes, progress)
        except httpx.ConnectError as error:
            raise UserError(f"{url} cannot be reached ({error}). {_manual_download_hint(path)}") from error
        except (httpx.TransportError, _TransientError) as error:
            last_error = str(error) or type(error).__name__
    raise UserError(
        f"{url} failed {num_attempts} times, last with: {last_error}. Run again to resume the download. "
        f"{_manual_download_hint(path)}"
    )


def _download_rest(url: str, part: Path, name: str, size_bytes: int | None, progress: Progress | None) -> None:
    existing_bytes = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={existing_bytes}-"} if existing_bytes else {})
    with httpx.stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        _check_status(response, url, part)
        is_resumed = response.headers.get("Content-Range", "").startswith(f"bytes {existing_bytes}-")
        if response.status_code == 206 and not is_resumed:
            part.unlink()
            raise _TransientError("the server sent another range than the requested one")
        received_bytes = existing_bytes if response.status_code == 206 else 0
        total = size_bytes or (received_bytes + int(response.headers.get("Content-Length", 0))) or None
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if received_bytes else "wb") as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                received_bytes += len(chunk)
                if progress is not None:
                    progress(name, received_bytes, total)
    if size_bytes is not None and received_bytes < size_bytes:
        raise _TransientError(f"the connection was cut after {received_bytes} of {size_bytes} bytes")


def _check_status(response: httpx.Response, url: str, part: Path) -> None:
    status = response.status_code
    if status == 416:
        part.unlink(missing_ok=True)
        raise _TransientError("the server has fewer bytes than the partial file")
    if status >= 500 or status in _BUSY_STATUSES:
        raise _TransientError(f"HTTP status {status}")
    if status not in (200, 206):
        raise UserError(f"{url} answered with HTTP status {status} ({response.reason_phrase}), so there is no file.")


def _check_checksum(part: Path, path: Path, sha256: str) -> None:
    with part.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        part.unlink()
        raise UserError(
            f"{path.name} has the wrong SHA-256: expected {sha256}, got {actual}. It was removed. Try again."
        )


def _manual_download_hint(path: Path) -> str:
    return (
        f"Or put {path.name} (unpacked, if it is an archive) by hand into the folder {path.parent.name} "
        "of any directory, and set SHOAL_DATA to that directory."
    )


def _disk_error_text(error: OSError, url: str, path: Path, size_bytes: int | None) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{size_bytes / 1e6:,.1f} MB" if size_bytes is not None else "more room"
        return (
            f"{path.parent} is full: {url} needs {need}. Free some space, or set XDG_CACHE_HOME to a folder on "
            "another disk. Then run again to resume the download."
        )
    return f"{error.filename or path} cannot be written: {error.strerror or error}."
