"""A service of a run that is still training. It loads newer models without an interruption."""

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

SAMPLES = {"samples": [[[float((i * j) % 16) for i in range(8)] for j in range(8)]]}


@pytest.fixture
def training(runs, tmp_path):
    """A copy of a run and a function that adds a round, whose models predict the class with the number of the round."""
    run_dir = tmp_path / "training"
    shutil.copytree(runs("ifca"), run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", num_kept=1)
    first = checkpoints.load(2).state

    def models_of(round):
        bias = torch.full((10,), -50.0)
        bias[round % 10] = 50.0
        return {name: m | {"head.bias": bias.clone()} for name, m in first.models.items()}

    def finish(round):
        checkpoints.save(replace(first, round=round, models=models_of(round)), [])
        checkpoints.discard_old()

    return run_dir, finish


def test_newer_models_are_loaded_without_a_failed_request(training):
    run_dir, finish = training
    finish(3)
    seen: list[tuple[int, str]] = []

    async def ask(client, url, until):
        while time.monotonic() < until:
            answer = await client.post(f"{url}/v1/predict", json=SAMPLES)
            assert answer.status_code == 200, answer.text
            content = answer.json()
            seen.append((content["round"], content["predictions"][0]["label"]))

    async def load(url):
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            until = time.monotonic() + 3
            await asyncio.gather(*(ask(client, url, until) for _ in range(8)))

    def train():
        for round in range(4, 16):
            time.sleep(0.2)
            finish(round)

    with running_server(run_dir, limits=Limits(requests_per_s=0), poll_s=0.02) as running:
        trainer = threading.Thread(target=train)
        trainer.start()
        asyncio.run(load(running.url))
        trainer.join()
        swaps = running.service.metrics.model_swaps._value.get()
    assert all(label == str(round % 10) for round, label in seen)  # a response is of exactly one round
    assert len({round for round, _ in seen}) >= 4
    assert swaps >= 4
    assert len(seen) > 50


def test_a_deleted_or_damaged_checkpoint_is_skipped(training):
    run_dir, finish = training
    checkpoints = Checkpoints(run_dir / "checkpoints")
    watch, taken = CheckpointWatcher(checkpoints), []
    assert watch.load_newer(lambda state: taken.append(state.round))
    assert not watch.load_newer(lambda state: taken.append(state.round))
    finish(3)
    (run_dir / "checkpoints/round-000003/state.safetensors").unlink()
    assert not watch.load_newer(lambda state: taken.append(state.round))
    finish(4)
    (run_dir / "checkpoints/round-000005").mkdir()
    assert watch.load_newer(lambda state: taken.append(state.round))
    assert taken == [2, 4]
    (run_dir / "checkpoints/round-000005").rmdir()
    finish(4)  # written again, as after a resumed run
    assert watch.load_newer(lambda state: taken.append(state.round))


def test_a_run_without_a_round_is_not_ready(training, http):
    run_dir, finish = training
    shutil.rmtree(run_dir / "checkpoints/round-000002")
    shutil.rmtree(run_dir / "checkpoints/round-000001")
    with running_server(run_dir) as running:
        assert http.get(f"{running.url}/healthz").json() == {"status": "ok", "round": None}
        answer = http.get(f"{running.url}/readyz")
        assert "no finished round yet" in problem_detail(answer, 503)
        assert answer.headers["retry-after"] == "1"
        problem_detail(http.post(f"{running.url}/v1/predict", json=SAMPLES), 503)
        finish(3)
        end = time.monotonic() + 5
        while http.get(f"{running.url}/readyz").status_code != 200 and time.monotonic() < end:
            time.sleep(0.02)
        assert http.get(f"{running.url}/readyz").json() == {"status": "ready", "round": 3}
        assert http.post(f"{running.url}/v1/predict", json=SAMPLES).json()["predictions"][0]["label"] == "3"


def test_a_run_without_inputs_json_is_refused(training):
    run_dir, _ = training
    (run_dir / "inputs.json").unlink()
    with pytest.raises(UserError, match=r"has no inputs\.json, which says how inputs are prepared"):
        Service(run_dir)


def test_requests_that_arrive_together_are_one_batch():
    batch_sizes: list[int] = []

    def predict(requests):
        batch_sizes.append(len(requests))
        if any(float(a.x.sum()) < 0 for a in requests):
            raise ValueError("a bad sample")
        return [PredictResult(1, a.x) for a in requests]

    async def ask():
        batcher = Batcher(predict, BatchOptions(max_samples=8, max_wait_s=0.2), Metrics())
        worker = asyncio.create_task(batcher.run())
        rows = [torch.full((1, 2), float(i)) for i in range(20)]
        began = time.monotonic()
        results = await asyncio.gather(*(batcher.submit(PredictRequest(x)) for x in rows))
        seconds = time.monotonic() - began
        assert all(torch.equal(result.predictions, x) for result, x in zip(results, rows, strict=True))
        outcomes = await asyncio.gather(
            *(batcher.submit(PredictRequest(torch.full((1, 2), x))) for x in (1.0, -1.0, 2.0)), return_exceptions=True
        )
        worker.cancel()
        batcher.close()
        return seconds, outcomes

    seconds, outcomes = asyncio.run(ask())
    assert batch_sizes[:3] == [8, 8, 4]
    assert seconds < 1
    assert isinstance(outcomes[1], ValueError)  # the other requests of the batch have results
    assert float(outcomes[0].predictions.sum()) == 2.0
    assert float(outcomes[2].predictions.sum()) == 4.0


def test_models_of_several_clusters_predict_in_one_stacked_batch(runs):
    version = load_newest(runs("ifca"))
    generator = torch.Generator().manual_seed(0)
    clients = [*version.state.membership, None]
    requests = [PredictRequest(torch.randn(1 + i % 3, 1, 8, 8, generator=generator), c) for i, c in enumerate(clients)]
    results = version.predict_batch(requests)
    served_by_key = {version.served_models(c).key: version.served_models(c) for c in clients}
    assert len(served_by_key) > 1
    assert version._is_stackable([(served, torch.zeros(1, 1, 8, 8), {}) for served in served_by_key.values()])
    with torch.no_grad():
        for (x, client, _), result in zip(requests, results, strict=True):
            alone = version.method.predict(version.method.models_for(version.state, client), {}, x).softmax(-1)
            assert torch.allclose(result.predictions.probabilities, alone, atol=1e-6)


def test_a_stop_responds_on_all_accepted_connections(runs, monkeypatch):
    """This includes connections whose request arrives only after the server accepts no more connections."""
    monkeypatch.setattr(server, "DRAIN_S", 3.0)
    body = json.dumps(SAMPLES).encode()
    head = (
        f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with running_server(runs("ifca"), limits=Limits(requests_per_s=0)) as running:
        callers = [socket.create_connection(("127.0.0.1", running.port), timeout=20) for _ in range(20)]
        _until(lambda: len(running.server.server_state.connections) == 20)
        running.server.should_exit = True
        _until(lambda: not _accepts(running.port))
        for caller in callers:
            caller.sendall(head.encode() + body)
        responses = [caller.recv(4096) for caller in callers]
        for caller in callers:
            caller.close()
        running.thread.join(20)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in responses)


def _accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_responds_to_running_requests(runs, stop_signal):
    """A real process receives a signal while a request waits for its batch."""
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
            answers.append(httpx.post(f"{url}/v1/predict", json=SAMPLES, trust_env=False, timeout=20))

        _until(lambda: httpx.get(f"{url}/readyz", trust_env=False, timeout=20).status_code == 200)
        caller = threading.Thread(target=ask)
        caller.start()
        _until(lambda: "shoal_queued_samples 0.0" not in httpx.get(f"{url}/metrics", trust_env=False, timeout=20).text)
        process.send_signal(stop_signal)
        caller.join(20)
        assert process.wait(20) == 0
    assert [a.status_code for a in answers] == [200]


def _until(condition, seconds=20):
    """Waits until the condition is true, because a busy machine may be slow."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
