"""`Remote` repeats requests, and predicts with cached models while the service is unavailable."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from services import running_server

from shoal.errors import UserError
from shoal.serve import Remote, RequestRejected, ServiceUnavailable
from shoal.serve.auth import hash_token

NO_PAUSE = {"sleep": lambda seconds: None}


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert all(a[key] == b[key] for key in ("label", "abstained", "expert"))
        assert list(a["probabilities"].values()) == pytest.approx(list(b["probabilities"].values()), abs=1e-6)
        assert a["routing_confidence"] == (
            None if b["routing_confidence"] is None else pytest.approx(b["routing_confidence"], abs=1e-6)
        )


def test_predictions_are_those_of_the_service(clustered, http, images):
    with Remote(clustered.url) as remote:
        response = remote.predict(images, abstain_below=0.5)
    expected = http.post(
        f"{clustered.url}/v1/predict", json={"samples": images.tolist()}, params={"abstain_below": 0.5}
    ).json()
    assert_close(response.predictions, expected["predictions"])
    assert response.round == 2
    assert not response.is_offline
    assert response.labels == [prediction["label"] for prediction in expected["predictions"]]


@pytest.mark.parametrize("client", [None, "c3"])
def test_cached_models_give_the_same_predictions_while_the_service_is_unavailable(client, runs, images, tmp_path):
    with running_server(runs("ifca")) as running:
        remote = Remote(running.url, client=client, cache=tmp_path, **NO_PAUSE)
        before = remote.predict(images)
    after = remote.predict(images, abstain_below=0.5)
    assert after.is_offline
    assert after.round == 2
    assert_close(
        after.predictions, [a | {"abstained": a["confidence"] < 0.5} | _label(a, 0.5) for a in before.predictions]
    )
    with pytest.raises(RequestRejected, match="must have the shape 1 x 8 x 8 for one sample"):
        remote.predict([[1.0, 2.0]])
    remote.cached_file.write_bytes(remote.cached_file.read_bytes()[:-8])
    with pytest.raises(ServiceUnavailable, match=r"is damaged\. Remove it"):
        remote.predict(images)


def _label(prediction, below):
    return {"label": None if prediction["confidence"] < below else prediction["label"]}


def test_user_code_that_the_service_names_needs_trust(runs, images, tmp_path):
    with running_server(runs("ensembles:ensemble")) as running:
        with Remote(running.url, cache=tmp_path, **NO_PAUSE) as remote:
            before = remote.predict(images)
        options = {"cache": tmp_path, **NO_PAUSE, "retries": 0}
        careful, trusting = Remote(running.url, **options), Remote(running.url, trusts_user_code=True, **options)
    with pytest.raises(UserError, match="Give trusts_user_code=True if you trust it"):
        careful.predict(images)
    assert_close(trusting.predict(images).predictions, before.predictions)


def test_models_are_downloaded_only_if_they_are_newer(clustered, tmp_path):
    with Remote(clustered.url, cache=tmp_path) as remote:
        assert remote.refresh()
        content = remote.cached_file.read_bytes()
        assert not remote.refresh()
        remote.cached_file.write_bytes(content[:-1] + b"x")
        assert remote.refresh()
        assert remote.cached_file.read_bytes() == content
        assert [p.name for p in tmp_path.iterdir()] == [remote.cached_file.name]


def test_without_service_and_cached_models_there_is_an_error(tmp_path):
    with Remote("http://127.0.0.1:9", cache=tmp_path, retries=2, **NO_PAUSE) as remote:
        with pytest.raises(ServiceUnavailable, match="after 3 attempts"):
            remote.predict([[1.0]])
        with pytest.raises(UserError, match="one array of numbers"):
            remote.predict([["a"]])


def test_a_rejected_request_is_not_repeated(clustered, images, runs):
    with Remote(clustered.url) as remote, pytest.raises(RequestRejected, match="422: samples has the shape 2"):
        remote.predict([1.0, 2.0])
    with running_server(runs("ifca"), tokens={"lab": hash_token("secret")}) as running:
        with Remote(running.url) as remote, pytest.raises(RequestRejected, match="401: The request has no token"):
            remote.predict(images)
        with Remote(running.url, token="secret") as remote:
            assert len(remote.predict(images).predictions) == 12


class Failing(BaseHTTPRequestHandler):
    """Responds with the statuses of a list, then with a prediction."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, wait = self.server.failures.pop(0) if self.server.failures else (200, None)
        self.server.statuses.append(status)
        if status == 0:
            self.connection.close()
            return
        body = json.dumps({"round": 1, "predictions": [{"label": "3"}]}).encode()
        self.send_response(status)
        if wait:
            self.send_header("Retry-After", wait)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def test_attempts_are_repeated_with_growing_pauses(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.failures, server.statuses = [(503, "2"), (0, None), (502, None), (429, "900")], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pauses = []
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with Remote(url, pause_s=0.4, sleep=pauses.append, cache=tmp_path) as remote:  # this server has no models
            assert remote.predict([[1.0]]).labels == ["3"]
            assert server.statuses == [503, 0, 502, 429, 200]
            assert pauses[0] == 2  # as Retry-After says
            assert 0.4 <= pauses[1] <= 1.2
            assert 0.8 <= pauses[2] <= 2.4
            assert pauses[3] == 5  # the longest pause
            server.failures, server.statuses = [(503, None)] * 9, []
            with pytest.raises(ServiceUnavailable, match="status 503"):
                remote.predict([[1.0]])
            assert len(server.statuses) == 5
    finally:
        server.shutdown()
        server.server_close()


def test_an_unavailable_service_receives_a_request_after_growing_pauses(runs, tmp_path, images):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.failures, server.statuses = [(503, None)] * 99, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    now = [0.0]
    try:
        with running_server(runs("ifca")) as running, Remote(running.url, cache=tmp_path) as remote:
            remote.refresh()
        url = f"http://127.0.0.1:{server.server_port}"
        with Remote(url, cache=tmp_path, clock=lambda: now[0], **NO_PAUSE) as remote:
            remote.cached_file.write_bytes(next(tmp_path.iterdir()).read_bytes())
            num_requests = []
            for second in range(8):
                now[0] = float(second)
                before = len(server.statuses)
                assert all(remote.predict(images[:1]).is_offline for _ in range(3))
                num_requests.append(len(server.statuses) - before)
            assert num_requests == [5, 1, 0, 1, 0, 0, 0, 1]  # after 1, 2 and 4 s
            server.failures.clear()
            assert remote.predict(images[:1]).is_offline
            now[0] = 15.0
            assert not remote.predict(images[:1]).is_offline
            server.failures[:] = [(503, None)] * 99
            before = len(server.statuses)
            assert remote.predict(images[:1]).is_offline
            assert len(server.statuses) - before == 5  # the pauses start again
    finally:
        server.shutdown()
        server.server_close()
