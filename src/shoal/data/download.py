"""One file over HTTP: resumed after a cut, checked, and only then given its name."""

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
_BUSY = {408, 425, 429}


class _Transient(Exception):
    """Worth another attempt."""


def fetch(
    url: str,
    path: Path,
    sha256: str,
    size: int | None = None,
    progress: Progress | None = None,
    *,
    attempts: int = 4,
    backoff_s: float = 1.0,
) -> Path:
    """`url` as `path`. The bytes so far are in `path.part`, from which the next call goes on."""
    part = path.with_name(path.name + ".part")
    try:
        _attempt_all(url, part, path, size, progress, attempts, backoff_s)
        _check(part, path, sha256)
        os.replace(part, path)
    except OSError as error:
        raise UserError(_disk_trouble(error, url, path, size)) from error
    return path


def _attempt_all(
    url: str,
    part: Path,
    path: Path,
    size: int | None,
    progress: Progress | None,
    attempts: int,
    backoff_s: float,
) -> None:
    trouble = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(backoff_s * 2 ** (attempt - 1))
        try:
            return _stream(url, part, path.name, size, progress)
        except httpx.ConnectError as error:
            raise UserError(f"{url} cannot be reached ({error}); {_by_hand(path)}") from error
        except (httpx.TransportError, _Transient) as error:
            trouble = str(error) or type(error).__name__
    raise UserError(
        f"{url} failed {attempts} times, last with: {trouble}; run again to go on from there, or {_by_hand(path)}"
    )


def _stream(url: str, part: Path, name: str, size: int | None, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        _check_status(response, url, part)
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status_code == 206 and not resumed:
            part.unlink()
            raise _Transient("the server sent another range than the one asked for")
        done = have if response.status_code == 206 else 0
        total = size or (done + int(response.headers.get("Content-Length", 0))) or None
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if done else "wb") as file:
            for chunk in response.iter_raw():
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(name, done, total)
    if size is not None and done < size:
        raise _Transient(f"the connection was cut after {done} of {size} bytes")


def _check_status(response: httpx.Response, url: str, part: Path) -> None:
    status = response.status_code
    if status == 416:
        part.unlink(missing_ok=True)
        raise _Transient("the server has fewer bytes than the part")
    if status >= 500 or status in _BUSY:
        raise _Transient(f"HTTP status {status}")
    if status not in (200, 206):
        raise UserError(f"{url} answered with HTTP status {status} ({response.reason_phrase}), so there is no file")


def _check(part: Path, path: Path, sha256: str) -> None:
    with part.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        part.unlink()
        raise UserError(
            f"{path.name} has the wrong SHA-256: expected {sha256}, got {got}; it was removed, so try again"
        )


def _by_hand(path: Path) -> str:
    return (
        f"put {path.name} (unpacked, if it is an archive) by hand into the folder {path.parent.name} "
        "of a directory of yours and let SHOAL_DATA name that directory"
    )


def _disk_trouble(error: OSError, url: str, path: Path, size: int | None) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"{size / 1e6:,.1f} MB" if size is not None else "more room"
        return (
            f"{path.parent} is full: {url} needs {need}; free some space or let XDG_CACHE_HOME name "
            "another disk, then run again to go on from there"
        )
    return f"{error.filename or path} cannot be written: {error.strerror or error}"
