from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shoal.data.download import fetch
from shoal.errors import UserError

BODY = np.random.default_rng(0).integers(0, 256, 700_000, dtype=np.uint8).tobytes()
SHA256 = hashlib.sha256(BODY).hexdigest()


class Server:
    """Responds to each request with the next of `responses`, and repeats the last one."""

    def __init__(self) -> None:
        self.responses: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self.ranges: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.ranges.append(self.headers.get("Range"))
                respond = outer.responses[min(len(outer.ranges), len(outer.responses)) - 1]
                respond(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/set/file.gz"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def complete(handler: BaseHTTPRequestHandler) -> None:
    """Sends all bytes and ignores Range."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY)


def ranged(handler: BaseHTTPRequestHandler) -> None:
    start = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
    handler.send_header("Content-Length", str(len(BODY) - start))
    handler.end_headers()
    handler.wfile.write(BODY[start:])


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY[:300_000])


def silent_cut(handler: BaseHTTPRequestHandler) -> None:
    """Sends a part without a length, so that only the expected size shows that bytes are missing."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(BODY[:300_000])


def status(code: int) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: handler.send_error(code)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def test_plain(server: Server, tmp_path: Path) -> None:
    server.responses = [complete]
    seen: list[tuple[str, int, int | None]] = []
    path = tmp_path / "new" / "file.gz"
    assert fetch(server.url, path, SHA256, len(BODY), lambda *step: seen.append(step)) == path
    assert path.read_bytes() == BODY
    assert not part_of(path).exists()
    assert seen[-1] == ("file.gz", 700_000, 700_000)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


@pytest.mark.parametrize("first", [cut, silent_cut])
def test_a_download_resumes_after_an_interruption(server: Server, tmp_path: Path, first) -> None:
    server.responses = [first, ranged]
    path = tmp_path / "file.gz"
    fetch(server.url, path, SHA256, len(BODY), backoff_s=0)
    assert path.read_bytes() == BODY
    assert server.ranges == [None, "bytes=300000-"]


def test_a_later_call_resumes_from_the_partial_file(server: Server, tmp_path: Path) -> None:
    server.responses = [ranged]
    path = tmp_path / "file.gz"
    part_of(path).write_bytes(BODY[:123])
    fetch(server.url, path, SHA256)
    assert path.read_bytes() == BODY
    assert server.ranges == ["bytes=123-"]


def test_a_server_that_ignores_ranges_sends_the_file_again(server: Server, tmp_path: Path) -> None:
    server.responses = [cut, complete]
    path = tmp_path / "file.gz"
    fetch(server.url, path, SHA256, backoff_s=0)
    assert path.read_bytes() == BODY
    assert server.ranges == [None, "bytes=300000-"]


def test_a_partial_file_that_is_too_long_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    server.responses = [status(416), complete]
    path = tmp_path / "file.gz"
    part_of(path).write_bytes(BODY + b"more")
    fetch(server.url, path, SHA256, backoff_s=0)
    assert path.read_bytes() == BODY
    assert server.ranges == ["bytes=700004-", None]


def test_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.responses = [complete]
    path = tmp_path / "file.gz"
    with pytest.raises(UserError, match=rf"file.gz has the wrong SHA-256: expected {'0' * 64}, got {SHA256}"):
        fetch(server.url, path, "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_404_is_final(server: Server, tmp_path: Path) -> None:
    server.responses = [status(404)]
    with pytest.raises(UserError, match=rf"{server.url} answered with HTTP status 404"):
        fetch(server.url, tmp_path / "file.gz", SHA256, backoff_s=0)
    assert len(server.ranges) == 1
    assert list(tmp_path.iterdir()) == []


def test_503_then_ok(server: Server, tmp_path: Path) -> None:
    server.responses = [status(503), status(503), complete]
    path = tmp_path / "file.gz"
    fetch(server.url, path, SHA256, backoff_s=0)
    assert path.read_bytes() == BODY
    assert len(server.ranges) == 3


def test_after_the_last_attempt_the_partial_file_is_kept(server: Server, tmp_path: Path) -> None:
    server.responses = [cut, status(503)]
    path = tmp_path / "file.gz"
    with pytest.raises(UserError, match=r"failed 3 times, last with: HTTP status 503\. Run again.*SHOAL_DATA"):
        fetch(server.url, path, SHA256, num_attempts=3, backoff_s=0)
    assert part_of(path).read_bytes() == BODY[:300_000]
    assert not path.exists()


def test_without_a_network_the_error_names_the_folder_for_the_file(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file.gz"
    with pytest.raises(UserError, match=r"cannot be reached.*put file.gz .* into the folder mnist .* SHOAL_DATA"):
        fetch(url, tmp_path / "mnist" / "file.gz", SHA256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_reported_with_the_needed_bytes(server: Server, tmp_path: Path) -> None:
    server.responses = [complete]
    path = tmp_path / "file.gz"
    part_of(path).symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"{tmp_path} is full: .* needs 0.7 MB"):
        fetch(server.url, path, SHA256, len(BODY))
    assert not path.exists()
    assert len(server.ranges) == 1


def test_a_path_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    server.responses = [complete]
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"file cannot be written: (Not a directory|File exists)"):
        fetch(server.url, tmp_path / "file" / "file.gz", SHA256)
