"""A service beside a run that is still training: newer models are taken up, and nobody notices."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
import torch
from services import problem_detail, running_server

from shoal.errors import UserError
from shoal.serve import server
from shoal.serve.admission import Limits
from shoal.serve.app import Service
from shoal.serve.batching import Batcher, BatchOptions
from shoal.serve.export import load_newest
from shoal.serve.model_version import PredictRequest, PredictResult
from shoal.serve.prometheus import Metrics
from shoal.serve.reload import CheckpointWatcher
from shoal.store.checkpoint import Checkpoints

ROWS = {"rows": [[[float((i * j) % 16) for i in range(8)] for j in range(8)]]}


@pytest.fixture
def training(runs, tmp_path):
    """A copy of a run to which rounds can be added: each with its models' last biases all at the round's class."""
    place = tmp_path / "training"
    shutil.copytree(runs("ifca"), place)
    checkpoints = Checkpoints(place / "checkpoints", num_kept=1)
    first = checkpoints.load(2).state

    def models_of(round):
        bias = torch.full((10,), -50.0)
        bias[round % 10] = 50.0
        return {name: m | {"head.bias": bias.clone()} for name, m in first.models.items()}

    def finish(round):
        checkpoints.save(replace(first, round=round, models=models_of(round)), [])
        checkpoints.discard_old()

    return place, finish


def test_newer_models_are_taken_up_in_mid_load_without_a_failed_request(training):
    place, finish = training
    finish(3)
    seen: list[tuple[int, str]] = []

    async def ask(client, url, until):
        while time.monotonic() < until:
            answer = await client.post(f"{url}/v1/predict", json=ROWS)
            assert answer.status_code == 200, answer.text
            said = answer.json()
            seen.append((said["round"], said["answers"][0]["label"]))

    async def load(url):
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            until = time.monotonic() + 3
            await asyncio.gather(*(ask(client, url, until) for _ in range(8)))

    def train():
        for round in range(4, 16):
            time.sleep(0.2)
            finish(round)

    with running_server(place, limits=Limits(requests_per_s=0), poll_s=0.02) as running:
        trainer = threading.Thread(target=train)
        trainer.start()
        asyncio.run(load(running.url))
        trainer.join()
        swaps = running.service.metrics.swaps._value.get()
    assert all(label == str(round % 10) for round, label in seen)  # an answer is of one round, whole
    assert len({round for round, _ in seen}) >= 4
    assert swaps >= 4
    assert len(seen) > 50


def test_a_checkpoint_that_vanishes_or_is_damaged_is_passed_over(training):
    place, finish = training
    checkpoints = Checkpoints(place / "checkpoints")
    watch, taken = CheckpointWatcher(checkpoints), []
    assert watch.load_newer(lambda state: taken.append(state.round))
    assert not watch.load_newer(lambda state: taken.append(state.round))
    finish(3)
    (place / "checkpoints/round-000003/state.safetensors").unlink()
    assert not watch.load_newer(lambda state: taken.append(state.round))
    finish(4)
    (place / "checkpoints/round-000005").mkdir()
    assert watch.load_newer(lambda state: taken.append(state.round))
    assert taken == [2, 4]
    (place / "checkpoints/round-000005").rmdir()
    finish(4)  # written anew, as after a stop
    assert watch.load_newer(lambda state: taken.append(state.round))


def test_a_run_without_a_round_is_not_ready(training, http):
    place, finish = training
    shutil.rmtree(place / "checkpoints/round-000002")
    shutil.rmtree(place / "checkpoints/round-000001")
    with running_server(place) as running:
        assert http.get(f"{running.url}/healthz").json() == {"status": "ok", "round": None}
        answer = http.get(f"{running.url}/readyz")
        assert "no finished round yet" in problem_detail(answer, 503)
        assert answer.headers["retry-after"] == "1"
        problem_detail(http.post(f"{running.url}/v1/predict", json=ROWS), 503)
        finish(3)
        end = time.monotonic() + 5
        while http.get(f"{running.url}/readyz").status_code != 200 and time.monotonic() < end:
            time.sleep(0.02)
        assert http.get(f"{running.url}/readyz").json() == {"status": "ready", "round": 3}
        assert http.post(f"{running.url}/v1/predict", json=ROWS).json()["answers"][0]["label"] == "3"


def test_a_run_of_an_older_version_is_refused_in_a_sentence(training):
    place, _ = training
    (place / "inputs.json").unlink()
    with pytest.raises(UserError, match=r"has no inputs\.json: it was begun by an older version"):
        Service(place)


def test_requests_that_come_together_are_one_pass():
    passes: list[int] = []

    def answer(asked):
        passes.append(len(asked))
        if any(float(a.x.sum()) < 0 for a in asked):
            raise ValueError("a poor row")
        return [PredictResult(1, a.x) for a in asked]

    async def ask():
        batcher = Batcher(answer, BatchOptions(max_samples=8, max_wait_s=0.2), Metrics())
        worker = asyncio.create_task(batcher.run())
        rows = [torch.full((1, 2), float(i)) for i in range(20)]
        began = time.monotonic()
        found = await asyncio.gather(*(batcher.submit(PredictRequest(x)) for x in rows))
        seconds = time.monotonic() - began
        assert all(torch.equal(told.predictions, x) for told, x in zip(found, rows, strict=True))
        poor = await asyncio.gather(
            *(batcher.submit(PredictRequest(torch.full((1, 2), x))) for x in (1.0, -1.0, 2.0)), return_exceptions=True
        )
        worker.cancel()
        batcher.close()
        return seconds, poor

    seconds, poor = asyncio.run(ask())
    assert passes[:3] == [8, 8, 4]
    assert seconds < 1
    assert isinstance(poor[1], ValueError)  # and its neighbours are answered all the same
    assert float(poor[0].said.sum()) == 2.0
    assert float(poor[2].said.sum()) == 4.0


def test_models_of_several_clusters_in_one_stacked_pass(runs):
    version = load_newest(runs("ifca"))
    generator = torch.Generator().manual_seed(0)
    clients = [*version.state.membership, None]
    asked = [PredictRequest(torch.randn(1 + i % 3, 1, 8, 8, generator=generator), c) for i, c in enumerate(clients)]
    told = version.predict_batch(asked)
    lots = {version.served_models(c).key: version.served_models(c) for c in clients}
    assert len(lots) > 1
    assert version._is_stackable([(lot, torch.zeros(1, 1, 8, 8), {}) for lot in lots.values()])
    with torch.no_grad():
        for (x, client, _), found in zip(asked, told, strict=True):
            alone = version.method.predict(version.method.models_for(version.state, client), {}, x).softmax(-1)
            assert torch.allclose(found.predictions.probabilities, alone, atol=1e-6)


def test_a_stop_answers_whom_it_has_let_in(runs, monkeypatch):
    """Also those of whom nothing has been heard when nobody is let in any more; there is a while for them to speak."""
    monkeypatch.setattr(server, "DRAIN_S", 3.0)
    body = json.dumps(ROWS).encode()
    head = (
        f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with running_server(runs("ifca"), limits=Limits(requests_per_s=0)) as running:
        callers = [socket.create_connection(("127.0.0.1", running.port), timeout=20) for _ in range(20)]
        _until(lambda: len(running.server.server_state.connections) == 20)
        running.server.should_exit = True
        _until(lambda: not _lets_in(running.port))
        for caller in callers:
            caller.sendall(head.encode() + body)
        said = [caller.recv(4096) for caller in callers]
        for caller in callers:
            caller.close()
        running.thread.join(20)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in said)


def _lets_in(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_answers_what_is_under_way(runs, asked):
    """A real process: a signal while a request waits for company."""
    run = runs("ifca")
    command = [sys.executable, "-m", "shoal", "serve", str(run), "--port", "0", "--max-wait-ms", "1500"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        line = process.stderr.readline()
        while " on http" not in line:
            assert process.poll() is None, line
            line = process.stderr.readline()
        url = line.split(" on ")[1].strip()
        answers: list[httpx.Response] = []

        def ask():
            answers.append(httpx.post(f"{url}/v1/predict", json=ROWS, trust_env=False, timeout=20))

        _until(lambda: httpx.get(f"{url}/readyz", trust_env=False, timeout=20).status_code == 200)
        caller = threading.Thread(target=ask)
        caller.start()
        _until(lambda: "shoal_queued_rows 0.0" not in httpx.get(f"{url}/metrics", trust_env=False, timeout=20).text)
        process.send_signal(asked)
        caller.join(20)
        assert process.wait(20) == 0
    assert [a.status_code for a in answers] == [200]


def _until(true, seconds=20):
    """A busy machine takes its time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
