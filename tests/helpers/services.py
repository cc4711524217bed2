"""Starts real servers on loopback, and builds requests to them."""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch

from shoal.serve.app import Service
from shoal.serve.server import ListenOptions, make_server


@contextmanager
def running_server(run, *, tls=None, limits=None, tokens=None, **options):
    server_socket = socket.socket()
    server_socket.bind(("127.0.0.1", 0))
    options_of_socket = {} if tls is None else {"certificate": tls[0], "key": tls[1]}
    if limits is not None:
        options_of_socket["limits"] = limits
    listening = ListenOptions(port=server_socket.getsockname()[1], tokens=tokens or {}, **options_of_socket)
    service = Service(run, **{"poll_s": 0.05} | options)
    server = make_server(service, listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]})
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield SimpleNamespace(url=listening.url, port=listening.port, service=service, server=server, thread=thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"


def to_npy(samples):
    stream = io.BytesIO()
    np.save(stream, samples, allow_pickle=False)
    return stream.getvalue()


def read_probabilities(answer):
    assert answer.status_code == 200, answer.text
    return torch.tensor([list(row["probabilities"].values()) for row in answer.json()["predictions"]])


def problem_detail(answer, status):
    """Checks that the response is a problem of RFC 9457 and returns its detail."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["title"]
    return problem["detail"]
