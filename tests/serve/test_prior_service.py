"""The service estimates the class prior of an unseen client and corrects its predictions."""

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
def unseen(run):
    return assemble_job(make_job(read_run(run).config)).federation.unseen


@pytest.fixture(scope="module")
def running(run):
    with running_server(run) as service:
        yield service


def post_samples(http, running, path, samples, **parameters):
    query = {"prepared": "true"} | parameters
    return http.post(f"{running.url}{path}", params=query, content=to_npy(samples.x.numpy()), headers=NPY)


def accuracy(response, samples):
    return float((read_probabilities(response).argmax(1) == samples.y).float().mean())


def test_predictions_are_those_that_a_run_evaluates(http, running, run, unseen):
    """They are those of `shoal evaluate --unseen`, without and with `--infer-from-inputs`."""
    plain, inferred = (evaluate.evaluate_unseen_clients(run, infer_from_inputs=x)["clients"] for x in (False, True))
    num_estimates = 0
    for client, rows in unseen.items():
        assert accuracy(post_samples(http, running, "/v1/predict", rows), rows) == pytest.approx(
            plain[client]["accuracy"]
        )
        prior = post_samples(http, running, "/v1/prior", rows).json()
        assert prior["num_inputs"] == len(rows.y)
        if prior["label_counts"] is not None:
            num_estimates += 1
            assert sum(prior["label_counts"].values()) == pytest.approx(len(rows.y), rel=1e-4)
            response = post_samples(http, running, "/v1/predict", rows, label_counts=prior["label_counts_text"])
            assert accuracy(response, rows) == pytest.approx(inferred[client]["accuracy"], abs=1.01 / len(rows.y))
    assert num_estimates, "the inputs of some client give an estimate"


def test_true_label_counts_improve_accuracy(http, running, unseen):
    none, true = [], []
    for rows in unseen.values():
        counts = np.bincount(rows.y.numpy(), minlength=10)
        none.append(accuracy(post_samples(http, running, "/v1/predict", rows), rows))
        true.append(
            accuracy(post_samples(http, running, "/v1/predict", rows, label_counts=",".join(map(str, counts))), rows)
        )
    assert np.mean(true) > np.mean(none)


def test_label_counts_of_callers_are_not_mixed(http, running, unseen):
    rows = next(iter(unseen.values()))
    first, last = (",".join("1000" if k == c else "0" for k in range(10)) for c in (0, 9))
    sure = [read_probabilities(post_samples(http, running, "/v1/predict", rows, label_counts=c)) for c in (first, last)]
    assert float(sure[0][:, 0].mean()) > float(sure[1][:, 0].mean())
    assert float(sure[1][:, 9].mean()) > float(sure[0][:, 9].mean())


def test_remote_estimates_the_prior_and_uses_it_offline(run, unseen, tmp_path):
    rows = max(unseen.values(), key=lambda r: len(r.y))
    with running_server(run) as service:
        remote = Remote(service.url, cache=tmp_path, retries=0)
        assert remote.estimate_prior(rows.x.numpy(), prepared=True) is not None
        online = remote.predict(rows.x.numpy(), prepared=True)
    offline = remote.predict(rows.x.numpy(), prepared=True)
    assert (online.is_offline, offline.is_offline) == (False, True)
    assert online.labels == offline.labels


def test_wrong_label_counts_are_refused(http, running, clustered, unseen):
    rows = next(iter(unseen.values()))
    assert "It must have 10, one for each class" in problem_detail(
        post_samples(http, running, "/v1/predict", rows, label_counts="1,2"), 422
    )
    assert "counts" in problem_detail(post_samples(http, running, "/v1/predict", rows, label_counts="1,x"), 422)
    assert "It must be one of prepared" in problem_detail(
        post_samples(http, running, "/v1/prior", rows, client="c0"), 422
    )
    for path, more in (("/v1/prior", {}), ("/v1/predict", {"label_counts": "1" + ",1" * 9})):
        detail = problem_detail(post_samples(http, clustered, path, rows, **more), 409)
        assert "has no prior correction" in detail
