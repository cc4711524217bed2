"""The caller's side: again if need be, and alone while the service is away."""

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


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert all(a[key] == b[key] for key in ("label", "abstained", "expert"))
        assert list(a["probabilities"].values()) == pytest.approx(list(b["probabilities"].values()), abs=1e-6)
        assert a["score"] == (None if b["score"] is None else pytest.approx(b["score"], abs=1e-6))


def test_answers_are_those_of_the_service(grouped, http, images):
    with Remote(grouped.url) as remote:
        found = remote.predict(images, abstain_below=0.5)
    said = http.post(f"{grouped.url}/v1/predict", json={"rows": images.tolist()}, params={"abstain_below": 0.5}).json()
    close(found.predictions, said["answers"])
    assert found.round == 2
    assert not found.is_offline
    assert found.labels == [row["label"] for row in said["answers"]]


@pytest.mark.parametrize("client", [None, "c3"])
def test_while_the_service_is_away_the_kept_models_answer_the_same(client, runs, images, tmp_path):
    with running_server(runs("ifca")) as running:
        remote = Remote(running.url, client=client, cache=tmp_path, **NO_PAUSE)
        before = remote.predict(images)
    after = remote.predict(images, abstain_below=0.5)
    assert after.is_offline
    assert after.round == 2
    close(after.predictions, [a | {"abstained": a["confidence"] < 0.5} | _label(a, 0.5) for a in before.predictions])
    with pytest.raises(RequestRejected, match="must be 1 x 8 x 8 for one row"):
        remote.predict([[1.0, 2.0]])
    remote.cached_file.write_bytes(remote.cached_file.read_bytes()[:-8])
    with pytest.raises(ServiceUnavailable, match="is damaged; remove it"):
        remote.predict(images)


def _label(answer, below):
    return {"label": None if answer["confidence"] < below else answer["label"]}


def test_code_that_the_service_names_is_not_run_unasked(runs, images, tmp_path):
    with running_server(runs("ensembles:ensemble")) as running:
        with Remote(running.url, cache=tmp_path, **NO_PAUSE) as remote:
            before = remote.predict(images)
        asked = {"cache": tmp_path, **NO_PAUSE, "retries": 0}
        careful, trusting = Remote(running.url, **asked), Remote(running.url, trusts_user_code=True, **asked)
    with pytest.raises(UserError, match="give own_code=True if you trust it"):
        careful.predict(images)
    close(trusting.predict(images).predictions, before.predictions)


def test_models_are_fetched_only_when_they_are_newer(grouped, tmp_path):
    with Remote(grouped.url, cache=tmp_path) as remote:
        assert remote.refresh()
        kept = remote.cached_file.read_bytes()
        assert not remote.refresh()
        remote.cached_file.write_bytes(kept[:-1] + b"x")
        assert remote.refresh()
        assert remote.cached_file.read_bytes() == kept
        assert [p.name for p in tmp_path.iterdir()] == [remote.cached_file.name]


def test_nothing_kept_and_nobody_there(tmp_path):
    with Remote("http://127.0.0.1:9", cache=tmp_path, retries=2, **NO_PAUSE) as remote:
        with pytest.raises(ServiceUnavailable, match="after 3 attempts"):
            remote.predict([[1.0]])
        with pytest.raises(UserError, match="one array of numbers"):
            remote.predict([["a"]])


def test_what_is_wrong_is_not_tried_again(grouped, images, runs):
    with Remote(grouped.url) as remote, pytest.raises(RequestRejected, match="422: rows: the shape is 2"):
        remote.predict([1.0, 2.0])
    with running_server(runs("ifca"), tokens={"lab": hash_token("secret")}) as running:
        with Remote(running.url) as remote, pytest.raises(RequestRejected, match="401: a token is needed"):
            remote.predict(images)
        with Remote(running.url, token="secret") as remote:
            assert len(remote.predict(images).predictions) == 12


class Failing(BaseHTTPRequestHandler):
    """Answers with the statuses of a list, then well."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, wait = self.server.failures.pop(0) if self.server.failures else (200, None)
        self.server.seen.append(status)
        if status == 0:
            self.connection.close()
            return
        body = json.dumps({"round": 1, "answers": [{"label": "3"}]}).encode()
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
    server.failures, server.seen = [(503, "2"), (0, None), (502, None), (429, "900")], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pauses = []
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with Remote(url, pause_s=0.4, sleep=pauses.append, cache=tmp_path) as remote:  # it has no models to keep
            assert remote.predict([[1.0]]).labels == ["3"]
            assert server.seen == [503, 0, 502, 429, 200]
            assert pauses[0] == 2  # as the service asked
            assert 0.4 <= pauses[1] <= 1.2
            assert 0.8 <= pauses[2] <= 2.4
            assert pauses[3] == 5  # but never for longer
            server.failures, server.seen = [(503, None)] * 9, []
            with pytest.raises(ServiceUnavailable, match="it answers 503"):
                remote.predict([[1.0]])
            assert len(server.seen) == 5
    finally:
        server.shutdown()
        server.server_close()


def test_a_service_that_is_known_to_be_away_is_asked_once_in_a_while(runs, tmp_path, images):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.failures, server.seen = [(503, None)] * 99, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    now = [0.0]
    try:
        with running_server(runs("ifca")) as running, Remote(running.url, cache=tmp_path) as remote:
            remote.refresh()
        url = f"http://127.0.0.1:{server.server_port}"
        with Remote(url, cache=tmp_path, clock=lambda: now[0], **NO_PAUSE) as remote:
            remote.cached_file.write_bytes(next(tmp_path.iterdir()).read_bytes())
            asked = []
            for second in range(8):
                now[0] = float(second)
                before = len(server.seen)
                assert all(remote.predict(images[:1]).is_offline for _ in range(3))
                asked.append(len(server.seen) - before)
            assert asked == [5, 1, 0, 1, 0, 0, 0, 1]  # after 1, 2 and 4 s
            server.failures.is_clear()
            assert remote.predict(images[:1]).is_offline
            now[0] = 15.0
            assert not remote.predict(images[:1]).is_offline
            server.failures[:] = [(503, None)] * 99
            before = len(server.seen)
            assert remote.predict(images[:1]).is_offline
            assert len(server.seen) - before == 5  # from the beginning
    finally:
        server.shutdown()
        server.server_close()
