"""Runs the service on a socket, with uvicorn and with time limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.errors import UserError
from shoal.serve.admission import AdmissionControl, Limits
from shoal.serve.app import Service, make_app
from shoal.serve.problems import MEDIA_TYPE, Problem
from shoal.serve.rate_limit import RateLimiter

BACKLOG = 1024  # connections that wait to be accepted
SHUTDOWN_GRACE_S = 20  # for running requests when the service stops
DRAIN_S = 0.1  # for requests on accepted connections, which would be lost if they were closed unread
TLS_CLOSE_S = 1  # for a caller to confirm the end of its TLS connection; asyncio alone would wait for 30 s


class GuardedProtocol(HttpToolsProtocol):
    """An HTTP protocol that closes connections whose headers are late, and connections above the limit."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes a connection above the limit, or starts the timer of its first headers."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.close()
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._cancel_header_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Starts the timer of a later request on the same connection."""
        super().on_message_begin()
        if self._timer is None:
            self._start_header_timer()

    def on_headers_complete(self) -> None:
        """Stops the timer."""
        self._cancel_header_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Aborts the connection after a while if it is closing."""
        super().on_response_complete()
        self._abort_if_closing()

    def shutdown(self) -> None:
        """Aborts the connection after a while if the server stops."""
        super().shutdown()
        self._abort_if_closing()

    def _abort_if_closing(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(TLS_CLOSE_S, self.transport.abort)

    def _start_header_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.header_timeout_s, self.timeout_keep_alive_handler)

    def _cancel_header_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Sends a problem for bytes that are not HTTP, and closes the connection."""
        body = Problem(400, "The request is not HTTP/1.1.").body()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class GracefulServer(uvicorn.Server):
    """A server that ends with exit code 0 after a signal, and that first responds to every accepted request."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. A second Ctrl-C does not wait for running requests.

        The signal is not raised again, because the server has handled it.
        """
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and ends when the running requests have their responses."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(DRAIN_S)
        await super().shutdown(sockets)


@dataclass(frozen=True)
class ListenOptions:
    """Where the service listens, and which callers it admits."""

    host: str = "127.0.0.1"
    port: int = 8000
    tokens: Mapping[str, str] = field(default_factory=dict)
    certificate: Path | None = None
    key: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.tokens and not is_loopback(self.host):
            raise UserError(
                f"host is {self.host!r}, which other machines can reach, but there are no tokens. Make one with "
                "`shoal token NAME` and give --tokens, or listen on 127.0.0.1."
            )
        if (self.certificate is None) != (self.key is None):
            raise UserError("Only one of --certificate and --key is given. Give both or neither.")
        for name, path in (("certificate", self.certificate), ("key", self.key)):
            if path is not None and not path.is_file():
                raise UserError(f"{name} is {str(path)!r}, but there is no such file. It must be a PEM file.")

    @property
    def url(self) -> str:
        """The address of the service."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(service: Service, options: ListenOptions) -> uvicorn.Server:
    """Returns the server of a service. Raises `UserError` if certificate and key cannot be used."""
    limits = options.limits
    admission = AdmissionControl(
        make_app(service), service.metrics, limits, options.tokens, RateLimiter(limits.requests_per_s)
    )
    tls: dict[str, Any] = {}
    if options.certificate and options.key:
        tls = {"ssl_certfile": str(options.certificate), "ssl_keyfile": str(options.key)}
    config = uvicorn.Config(
        admission,
        host=options.host,
        port=options.port,
        http=type("Guarded", (GuardedProtocol,), {"limits": limits}),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        **tls,
    )
    try:
        config.load()
    except OSError as error:  # errors of ssl are OSErrors too
        raise UserError(
            f"The certificate {options.certificate} and the key {options.key} cannot be used: "
            f"{_tls_problem(options, error)}."
        ) from None
    return GracefulServer(config)


def _tls_problem(options: ListenOptions, error: OSError) -> str:
    """Returns the cause of the error, from the content of the files if that shows it."""
    assert options.certificate is not None and options.key is not None, "both files are given"
    certificate_bytes, key_bytes = options.certificate.read_bytes(), options.key.read_bytes()
    certificate, key = b"BEGIN CERTIFICATE", b"PRIVATE KEY-----"
    if (
        certificate not in certificate_bytes
        and key not in key_bytes
        and certificate in key_bytes
        and key in certificate_bytes
    ):
        return "the first has a private key and the second has a certificate, so they are probably swapped"
    if certificate not in certificate_bytes:
        return f"{options.certificate} has no certificate, and must be a PEM file with one"
    if key not in key_bytes:
        return f"{options.key} has no private key, and must be a PEM file with one"
    return str(error)


def bind_socket(options: ListenOptions) -> tuple[socket.socket, ListenOptions]:
    """Returns a listening socket, and the options with its port. Callers can connect from now on."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    server_socket = socket.socket(family)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server_socket.bind((options.host, options.port))
    except OSError as error:
        server_socket.close()
        raise UserError(f"port is {options.port}, but it cannot be used on {options.host}: {error.strerror}.") from None
    server_socket.listen(BACKLOG)
    return server_socket, replace(options, port=server_socket.getsockname()[1])


def serve(service: Service, options: ListenOptions, on_start: Callable[[str], None]) -> None:
    """Runs the service until it is stopped. Calls `on_start` with its address."""
    torch.set_num_threads(1)  # batches are small, and several threads of one batch would wait for each other
    server = make_server(service, options)
    server_socket, options = bind_socket(options)
    on_start(options.url)
    server.run(sockets=[server_socket])
