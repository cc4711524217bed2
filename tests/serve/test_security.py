"""Tokens, TLS, and the limits of size, rate, time and connections. The service stays up in every case."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import socket
import ssl
import time

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from services import problem_detail, running_server, to_npy

from shoal.errors import UserError
from shoal.serve import Remote, UntrustedCertificate
from shoal.serve.admission import Limits
from shoal.serve.auth import find_token_name, hash_token, load_tokens, new_token, read_tokens
from shoal.serve.rate_limit import MAX_CALLERS, RateLimiter
from shoal.serve.server import ListenOptions

SAMPLES = {"samples": [[[0.0] * 8] * 8]}


def predict(running, **options):
    return httpx.post(f"{running.url}/v1/predict", json=SAMPLES, trust_env=False, **options)


def test_tokens(runs, tmp_path):
    file = tmp_path / "tokens.txt"
    token, other = new_token("lab", file), new_token("ward-3", file)
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    with running_server(runs("ifca"), tokens=load_tokens(file)) as running:
        for good in (token, other):
            assert predict(running, headers={"Authorization": f"Bearer {good}"}).status_code == 200
        for bad, sentence in (
            ({}, "The request has no token. Send the header Authorization: Bearer TOKEN"),
            ({"Authorization": f"Bearer {token[:-1]}"}, "The token is not a token of this service."),
            ({"Authorization": f"Basic {token}"}, "another scheme. It must be Authorization: Bearer TOKEN"),
        ):
            answer = predict(running, headers=bad)
            assert sentence in problem_detail(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/metrics", "/v1/models", "/v1/models/served", "/openapi.json", "/nowhere"):
            problem_detail(httpx.get(running.url + path, trust_env=False), 401)
        for path in ("/healthz", "/readyz"):
            assert httpx.get(running.url + path, trust_env=False).status_code == 200


def test_the_file_of_tokens(tmp_path, monkeypatch):
    file = tmp_path / "tokens.txt"
    token = new_token("lab", file)
    assert find_token_name(load_tokens(file), f"bearer {token}") == "lab"
    with pytest.raises(UserError, match="already has a token of that name"):
        new_token("lab", file)
    with pytest.raises(UserError, match="It must have 1 to 64 letters"):
        new_token("a b", file)
    monkeypatch.setenv("SHOAL_TOKENS", f"ci {hash_token('abc')}, night {hash_token('def')}")
    assert set(load_tokens(file)) == {"ci", "night", "lab"}
    with pytest.raises(UserError, match="line 2 does not have the form NAME HASH"):
        read_tokens(["# ours", "lab abc"], "tokens.txt")
    with pytest.raises(UserError, match="there is no such file"):
        load_tokens(tmp_path / "other.txt")


def test_a_public_host_needs_tokens():
    for host in ("127.0.0.1", "::1", "localhost"):
        ListenOptions(host=host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(UserError, match="there are no tokens"):
            ListenOptions(host=host)
        ListenOptions(host=host, tokens={"lab": hash_token("x")})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Signed by itself, for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder / "cert.pem", folder / "key.pem"


def test_an_untrusted_certificate_is_not_an_unavailable_service(runs, certificate, tmp_path):
    """Cached models do not predict either, because the server may be a different one."""
    rows, slept = np.zeros((1, 1, 8, 8)), []
    with running_server(runs("ifca"), tls=certificate) as running:
        trusted = ssl.create_default_context(cafile=str(certificate[0]))
        Remote(running.url, cache=tmp_path, verify=trusted).predict(rows)
        with pytest.raises(UntrustedCertificate, match="is not trusted"):
            Remote(running.url, cache=tmp_path, sleep=slept.append).predict(rows)
    assert slept == [], "the request is not repeated"


def test_tls(runs, certificate):
    with running_server(runs("ifca"), tls=certificate) as running:
        assert running.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        assert predict(running, verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            predict(running)
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url.replace("https", "http"), trust_env=False)
        assert predict(running, verify=trusting).status_code == 200


def test_a_silent_tls_caller_does_not_hold_up_the_stop(runs, certificate):
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with running_server(runs("ifca"), tls=certificate) as running:
        plain = socket.create_connection(("127.0.0.1", running.port))
        with trusting.wrap_socket(plain, server_hostname="127.0.0.1") as idle:
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            running.server.should_exit = True
            running.thread.join(10)
            assert not running.thread.is_alive(), "the server still waits for the end of the TLS connection"


def test_certificate_and_key_are_checked(runs, certificate, tmp_path):
    with pytest.raises(UserError, match="Give both or neither"):
        ListenOptions(certificate=certificate[0])
    with pytest.raises(UserError, match="there is no such file"):
        ListenOptions(certificate=certificate[0], key=tmp_path / "key.pem")
    other = tmp_path / "other.pem"
    other.write_bytes(certificate[1].read_bytes()[:60])
    for tls, why in (
        ((certificate[1], certificate[0]), "cannot be used: .* so they are probably swapped"),
        ((certificate[1], certificate[1]), r"key\.pem has no certificate"),
        ((certificate[0], certificate[0]), r"cert\.pem has no private key"),
        ((certificate[0], other), "cannot be used: .*PEM"),
    ):
        with pytest.raises(UserError, match=why), running_server(runs("ifca"), tls=tls):
            pass


def test_a_body_that_is_too_large(runs):
    with running_server(runs("ifca"), limits=Limits(max_body_bytes=10_000, requests_per_s=0)) as running:
        url, media = f"{running.url}/v1/predict", {"Content-Type": "application/x-npy"}
        answer = httpx.post(url, content=b"x" * 10_001, headers=media, trust_env=False)
        assert "10001 bytes. It may have at most 10000 bytes." in problem_detail(answer, 413)

        def chunks():
            for _ in range(11):
                yield b"x" * 1000

        answer = httpx.post(url, content=chunks(), headers=media, trust_env=False)
        assert "more than 10000 bytes" in problem_detail(answer, 413)
        assert predict(running).status_code == 200


def test_a_stream_without_an_end_is_cut_off(runs):
    with running_server(runs("ifca"), limits=Limits(max_body_bytes=10_000, requests_per_s=0)) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as s:
            s.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            sent = 0
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                while sent < 50_000_000:
                    s.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    sent += 1024
        assert sent < 20_000_000
        assert predict(running).status_code == 200


def closed_after(running, first, drip=b"", every_s=0.1, max_s=8):
    """Returns after how many seconds the service closes a slow connection, and its response."""
    start_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", running.port), timeout=every_s) as s:
        s.sendall(first)
        response = b""
        while time.monotonic() - start_s < max_s:
            try:
                part = s.recv(4096)
                if not part:
                    return time.monotonic() - start_s, response
                response += part
            except TimeoutError:
                if drip:
                    s.sendall(drip)
            except OSError:
                return time.monotonic() - start_s, response
    raise AssertionError("the connection was never closed")


def test_slow_connections_are_closed(runs):
    limits = Limits(header_timeout_s=0.5, body_timeout_s=0.5, requests_per_s=0)
    post = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with running_server(runs("ifca"), limits=limits) as running:
        for first, drip in ((b"", b""), (b"GET /heal", b""), (b"GET /healthz HTTP/1.1\r\n", b"X: y\r\n")):
            seconds, response = closed_after(running, first, drip)
            assert 0.4 < seconds < 3
            assert response == b""
        seconds, response = closed_after(running, post + b"Content-Length: 5000\r\n\r\n", b"1")
        assert 0.4 < seconds < 3
        assert response.startswith(b"HTTP/1.1 408")
        assert b"application/problem+json" in response
        requests = (
            post + b"Content-Length: 2\r\n\r\n{}" + b"GET /healthz HTTP/1.1\r\nHost: "
        )  # a second request, slowly
        seconds, response = closed_after(running, requests, b"x")
        assert response.startswith(b"HTTP/1.1 422")
        assert seconds < 3
        assert predict(running).status_code == 200


def test_a_request_that_is_not_http_is_refused(runs):
    with running_server(runs("ifca"), limits=Limits(requests_per_s=0)) as running:
        for nonsense in (b"\x16\x03\x01\x02\x00\x01", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            _, response = closed_after(running, nonsense)
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert json.loads(body)["status"] == 400
        assert predict(running).status_code == 200


def test_too_many_connections(runs):
    with running_server(runs("ifca"), limits=Limits(max_connections=3, requests_per_s=0)) as running:
        connections = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(3)]
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", running.port), timeout=2) as one_more:
            assert one_more.recv(1) == b""
        for s in connections:
            s.close()
        time.sleep(0.1)
        assert predict(running).status_code == 200


def test_rates():
    now = 0.0
    rates = RateLimiter(2, clock=lambda: now)
    assert [rates.wait_s("a") for _ in range(3)] == [0, 0, 0.5]  # a bucket of 2, and half a second for the next
    assert rates.wait_s("b") == 0
    now = 0.5
    assert rates.wait_s("a") == 0
    assert rates.wait_s("a") == 0.5
    now = 100.0
    assert [rates.wait_s("a") for _ in range(3)] == [0, 0, 0.5]  # no more than the bucket holds
    for i in range(MAX_CALLERS + 10):
        rates.wait_s(f"other {i}")
    assert len(rates._buckets) == MAX_CALLERS
    assert all(RateLimiter(0).wait_s("a") == 0 for _ in range(1000))


def test_too_many_requests_are_refused(runs, http):
    with running_server(runs("ifca"), limits=Limits(requests_per_s=2)) as running:
        answers = [http.post(f"{running.url}/v1/predict", json=SAMPLES) for _ in range(9)]
        late = [a for a in answers if a.status_code != 200]
        assert 1 <= len(late) <= 7
        assert "more than 2 requests per second" in problem_detail(late[0], 429)
        assert late[0].headers["retry-after"] == "1"
        assert httpx.get(f"{running.url}/healthz", trust_env=False).status_code == 200
        time.sleep(1)
        assert predict(running).status_code == 200


def test_each_token_has_a_rate_of_its_own(runs):
    tokens = {name: hash_token(name) for name in ("one", "two")}
    with running_server(runs("ifca"), limits=Limits(requests_per_s=3), tokens=tokens) as running:
        one, two = ({"Authorization": f"Bearer {name}"} for name in tokens)
        assert 429 in [predict(running, headers=one).status_code for _ in range(6)]
        assert predict(running, headers=two).status_code == 200


def test_a_full_queue_is_a_problem(runs, images):
    from shoal.serve.batching import BatchOptions

    async def all_at_once(url):
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            body = {"content": to_npy(images), "headers": {"Content-Type": "application/x-npy"}}
            return await asyncio.gather(*(client.post(url, **body) for _ in range(12)))

    with running_server(runs("ifca"), batching=BatchOptions(1000, 0.5, max_queued_samples=30), poll_s=5) as running:
        answers = asyncio.run(all_at_once(f"{running.url}/v1/predict"))
        full = [a for a in answers if a.status_code != 200]
        assert len(full) == 10  # twelve rows each: two fit
        assert "The queue is full" in problem_detail(full[0], 503)
        assert full[0].headers["retry-after"] == "1"
        assert predict(running).status_code == 200
