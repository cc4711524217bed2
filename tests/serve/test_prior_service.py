"""Whoever never trained has its class frequencies estimated by the service, and counted into its answers."""

from __future__ import annotations

import numpy as np
import pytest
from services import problem_detail, read_probabilities, running_server, to_npy

from shoal.experiment import evaluate
from shoal.experiment.assemble import assemble_job
from shoal.experiment.job import make_job
from shoal.serve import Remote
from shoal.store.reader import read_run

NPY = {"Content-Type": "application/x-npy"}
JOB = {"unseen": 3, "rounds": 12, "partition": "dirichlet:0.2", "lr": 0.2}


@pytest.fixture(scope="module")
def run(runs):
    return runs("shoal", **JOB)


@pytest.fixture(scope="module")
def held(run):
    return assemble_job(make_job(read_run(run).config)).federation.unseen


@pytest.fixture(scope="module")
def running(run):
    with running_server(run) as service:
        yield service


def asked(http, running, path, rows, **parameters):
    given = {"prepared": "true"} | parameters
    return http.post(f"{running.url}{path}", params=given, content=to_npy(rows.x.numpy()), headers=NPY)


def hits(answer, rows):
    return float((read_probabilities(answer).argmax(1) == rows.y).float().mean())


def test_answers_are_those_that_a_run_evaluates(http, running, run, held):
    """Without labels as `shoal evaluate --unseen`, and by its inputs as `--assign`."""
    plain, assigned = (evaluate.evaluate_unseen_clients(run, infer_from_inputs=x)["clients"] for x in (False, True))
    counted = 0
    for client, rows in held.items():
        assert hits(asked(http, running, "/v1/predict", rows), rows) == pytest.approx(plain[client]["accuracy"])
        told = asked(http, running, "/v1/prior", rows).json()
        assert told["inputs"] == len(rows.y)
        if told["counts"] is not None:
            counted += 1
            assert sum(told["counts"].values()) == pytest.approx(len(rows.y), rel=1e-4)
            answer = asked(http, running, "/v1/predict", rows, counts=told["parameter"])
            assert hits(answer, rows) == pytest.approx(assigned[client]["accuracy"], abs=1.01 / len(rows.y))
    assert counted, "somebody's inputs said something"


def test_frequencies_that_are_known_count_most(http, running, held):
    none, true = [], []
    for rows in held.values():
        counts = np.bincount(rows.y.numpy(), minlength=10)
        none.append(hits(asked(http, running, "/v1/predict", rows), rows))
        true.append(hits(asked(http, running, "/v1/predict", rows, counts=",".join(map(str, counts))), rows))
    assert np.mean(true) > np.mean(none)


def test_callers_with_other_frequencies_are_not_mixed_up(http, running, held):
    rows = next(iter(held.values()))
    first, last = (",".join("1000" if k == c else "0" for k in range(10)) for c in (0, 9))
    sure = [read_probabilities(asked(http, running, "/v1/predict", rows, counts=c)) for c in (first, last)]
    assert float(sure[0][:, 0].mean()) > float(sure[1][:, 0].mean())
    assert float(sure[1][:, 9].mean()) > float(sure[0][:, 9].mean())


def test_remote_learns_and_remembers_while_it_is_alone(run, held, tmp_path):
    rows = max(held.values(), key=lambda r: len(r.y))
    with running_server(run) as service:
        remote = Remote(service.url, cache=tmp_path, retries=0)
        assert remote.estimate_prior(rows.x.numpy(), prepared=True) is not None
        online = remote.predict(rows.x.numpy(), prepared=True)
    offline = remote.predict(rows.x.numpy(), prepared=True)
    assert (online.is_offline, offline.is_offline) == (False, True)
    assert online.labels == offline.labels


def test_what_is_wrong_with_counts_is_said(http, running, grouped, held):
    rows = next(iter(held.values()))
    assert "there are 10 classes" in problem_detail(asked(http, running, "/v1/predict", rows, counts="1,2"), 422)
    assert "counts" in problem_detail(asked(http, running, "/v1/predict", rows, counts="1,x"), 422)
    assert "it must be one of prepared" in problem_detail(asked(http, running, "/v1/prior", rows, client="c0"), 422)
    for path, more in (("/v1/prior", {}), ("/v1/predict", {"counts": "1" + ",1" * 9})):
        said = problem_detail(asked(http, grouped, path, rows, **more), 409)
        assert "makes nothing of how often classes occur" in said
