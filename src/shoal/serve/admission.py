"""Checks every request before the service works on it: its token, rate, size and duration."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.serve.auth import find_token_name
from shoal.serve.problems import Problem, retry_after
from shoal.serve.prometheus import Metrics
from shoal.serve.rate_limit import RateLimiter

log = logging.getLogger(__name__)

UNAUTHENTICATED_PATHS = ("/healthz", "/readyz")  # for load balancers; their responses reveal nothing about the models


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections."""

    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 10.0
    header_timeout_s: float = 10.0
    requests_per_s: float = 200.0  # of one caller; 0 sets no limit
    max_connections: int = 1024


def _authorization_problem(authorization: str) -> str:
    """Returns what is wrong with an Authorization header that has no known token."""
    if not authorization:
        return "The request has no token. Send the header Authorization: Bearer TOKEN with a token of this service."
    if authorization.partition(" ")[0].lower() != "bearer":
        return "The header Authorization has another scheme. It must be Authorization: Bearer TOKEN."
    return "The token is not a token of this service. It may be mistyped, revoked, or of another service."


@dataclass(frozen=True)
class AdmissionControl:
    """An ASGI application that checks requests and passes them on to `app`."""

    app: ASGIApp
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    tokens: Mapping[str, str] = field(default_factory=dict)  # name -> hash; without tokens every caller is admitted
    rate_limiter: RateLimiter = field(default_factory=lambda: RateLimiter(0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start_s, status = time.perf_counter(), 500

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            try:
                self._admit(scope, headers)
                receive_body = await self._read_body(headers, receive)
            except Problem as problem:
                problem.headers["Connection"] = "close"  # the rest of the body is not read
                await problem.response()(scope, receive, send_and_record)
                return
            await self._run_app(scope, receive_body, send_and_record)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, status).inc()
            self.metrics.request_seconds.labels(path).observe(time.perf_counter() - start_s)

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:  # the response 500 has been sent already, so the connection can stay open
            log.exception("A request to %s failed.", scope["path"])

    def _admit(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] in UNAUTHENTICATED_PATHS:
            return
        address = scope["client"][0] if scope.get("client") else "unknown"
        caller = f"address {address}"
        if self.tokens:
            authorization = headers.get("authorization", "")
            name = find_token_name(self.tokens, authorization)
            if name is None:
                self._enforce_rate(f"stranger {address}")
                raise Problem(
                    401, _authorization_problem(authorization), "Authorization", {"WWW-Authenticate": "Bearer"}
                )
            caller = f"token {name}"
        self._enforce_rate(caller)

    def _enforce_rate(self, caller: str) -> None:
        wait_s = self.rate_limiter.wait_s(caller)
        if wait_s:
            raise Problem(
                429,
                f"The caller sent more than {self.rate_limiter.requests_per_s:g} requests per second.",
                headers=retry_after(wait_s),
            )

    async def _read_body(self, headers: Headers, receive: Receive) -> Receive:
        """Returns a receive function that gives the whole body at once.

        Raises `Problem` if the body is too large or does not arrive in time.
        """
        max_bytes = self.limits.max_body_bytes
        content_length = headers.get("content-length", "0")
        if content_length.isdigit() and int(content_length) > max_bytes:
            raise Problem(413, f"The body has {content_length} bytes. It may have at most {max_bytes} bytes.", "body")
        if content_length == "0" and "transfer-encoding" not in headers:
            return receive
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise Problem(
                            413,
                            f"The body has more than {max_bytes} bytes. It may have at most {max_bytes} bytes.",
                            "body",
                        )
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Problem(408, f"The body did not arrive within {self.limits.body_timeout_s:g} s.", "body") from None
        has_sent = False

        async def receive_once() -> Message:
            nonlocal has_sent
            if has_sent:
                return await receive()
            has_sent = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return receive_once
