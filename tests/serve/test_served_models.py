"""Downloads of models, assignment to clusters, and the metrics of the service."""

from __future__ import annotations

import json

import pytest
import torch
from services import problem_detail, running_server

from shoal import tree
from shoal.client_table import ClientTable
from shoal.codec import unpack
from shoal.serve.assign import cluster_memberships
from shoal.serve.export import load_newest


def test_models_are_listed_and_downloaded(clustered, http):
    state = load_newest(clustered.service.run_dir).state
    listed = http.get(f"{clustered.url}/v1/models").json()
    assert listed["round"] == 2
    assert listed["method"] == "ifca"
    assert listed["input_shape"] == [1, 8, 8]
    assert [m["id"] for m in listed["models"]] == ["served", *sorted(state.models)]
    for facts in listed["models"]:
        answer = http.get(f"{clustered.url}/v1/models/{facts['id']}")
        assert answer.status_code == 200
        assert len(answer.content) == facts["num_bytes"]
        models, _ = unpack(answer.content)
        right = clustered.service.version.models(facts["id"])
        assert tree.max_abs_difference(models, right) == 0
        assert sum(x.numel() for x in tree.leaves(models)) == facts["num_parameters"]


def test_the_serving_models_of_a_client_can_be_downloaded(clustered, http):
    version = load_newest(clustered.service.run_dir)
    for client in version.state.membership:
        models, facts = unpack(http.get(f"{clustered.url}/v1/models/served", params={"client": client}).content)
        assert tree.max_abs_difference(models, version.method.models_for(version.state, client)) == 0
        assert facts["expert"] == version.served_models(client).expert
    sentence = problem_detail(http.get(f"{clustered.url}/v1/models/expert-000", params={"client": client}), 404)
    assert (
        "id is expert-000, which is the same model for all clients. Leave client out, or download served." in sentence
    )


def test_a_download_does_not_reveal_where_the_data_are(clustered, http):
    _, facts = unpack(http.get(f"{clustered.url}/v1/models/served").content)
    assert set(facts) == {"job", "inputs", "expert", "round"}
    assert not {"data", "partition", "seed", "label_column"} & set(facts["job"])
    assert str(clustered.service.run_dir) not in json.dumps(facts)


def test_a_model_that_the_caller_has_is_not_sent_again(clustered, http):
    url = f"{clustered.url}/v1/models/expert-001"
    first = http.get(url)
    etag = first.headers["etag"]
    for known_etags in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = http.get(url, headers={"If-None-Match": known_etags})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == etag
    assert http.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    assert http.get(f"{clustered.url}/v1/models/expert-000").headers["etag"] != etag
    head = http.head(url)
    assert head.headers["etag"] == etag
    assert head.headers["content-length"] == str(len(first.content))
    assert head.content == b""


def test_the_list_of_models_has_an_etag_too(clustered, http):
    url = f"{clustered.url}/v1/models"
    first = http.get(url)
    again = http.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = http.head(url)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "shoal-round"):
        assert head.headers[name] == first.headers[name]


def test_an_unknown_model_is_refused(clustered, http):
    sentence = problem_detail(http.get(f"{clustered.url}/v1/models/expert-999"), 404)
    assert "id is 'expert-999', which is not a model. It must be one of served, expert-000" in sentence
    problem_detail(http.get(f"{clustered.url}/v1/models/..%2f..%2fconfig.json"), 404)


PLANTED_GROUPS = {"partition": "labels:0-2/3-5/6-9", "clients": 9, "cohort": 9}


@pytest.mark.parametrize("method", ["fedepc", "fedgroup", "scmoe", "clsm-fl"])
def test_the_representation_of_a_client_is_assigned_to_its_cluster(method, runs, http):
    run = runs(method, **PLANTED_GROUPS, rounds=3)
    state = load_newest(run).state
    memory = state.memory["train" if method in ("scmoe", "clsm-fl") else "cluster"]
    table = ClientTable.from_tree(memory.get("known", memory))
    if method == "fedgroup":
        vectors = dict(zip(sorted(state.models), memory["directions"], strict=True))
        right = dict(zip(vectors, torch.eye(len(vectors)), strict=True))
    else:
        column = {"fedepc": "rows", "scmoe": "direction", "clsm-fl": "able"}[method]
        vectors = dict(zip(table.clients, table[column], strict=True))
        right = {c: state.membership[c] for c in vectors}
    with running_server(run) as running:
        num_agreeing = 0
        for name, vector in vectors.items():
            answer = http.post(f"{running.url}/v1/clusters/assign", json={"representation": vector.tolist()})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert list(found["memberships"]) == sorted(state.models)
            assert sum(found["memberships"].values()) == pytest.approx(1)
            assert found["memberships"][found["nearest"]] == max(found["memberships"].values())
            num_agreeing += (
                float(right[name][sorted(state.models).index(found["nearest"])]) >= float(right[name].max()) - 1e-6
            )
        assert num_agreeing >= 0.7 * len(vectors)


def test_fuzzy_memberships_are_those_of_the_training(runs):
    run = runs("clsm-fl", **PLANTED_GROUPS, rounds=3)
    version = load_newest(run)
    table = ClientTable.from_tree(version.state.memory["train"]["known"])
    for client, vector in zip(table.clients, table["able"], strict=True):
        found = cluster_memberships(version.method, version.state, vector.tolist())
        assert list(found.values()) == pytest.approx(version.state.membership[client].tolist(), abs=0.02)


def test_vectors_that_cannot_be_compared(runs, clustered, http):
    sentence = problem_detail(http.post(f"{clustered.url}/v1/clusters/assign", json={"representation": [1, 2]}), 409)
    assert "ifca, which has no representations of clusters" in sentence
    with running_server(runs("fedepc", **PLANTED_GROUPS, rounds=3)) as running:
        url = f"{running.url}/v1/clusters/assign"
        assert "has 2 numbers. It must have 120." in problem_detail(
            http.post(url, json={"representation": [0, 1]}), 422
        )
        assert "between 0 and 1" in problem_detail(http.post(url, json={"representation": [2.0] * 120}), 422)
        assert "has true or false" in problem_detail(http.post(url, json={"representation": [True] + [0.5] * 119}), 422)
        assert "array of numbers" in problem_detail(http.post(url, json={"representation": ["a"] * 120}), 422)
        assert "field required" in problem_detail(http.post(url, json={}), 422)
        assert "not JSON" in problem_detail(
            http.post(url, content=b"{", headers={"Content-Type": "application/json"}), 400
        )


def test_predictions_are_counted(runs, http, images):
    with running_server(runs("ensembles:ensemble")) as running:
        body = {"samples": images.tolist()}
        predictions = http.post(f"{running.url}/v1/predict", json=body, params={"abstain_below": 1}).json()[
            "predictions"
        ]
        expert = predictions[0]["expert"]
        http.get(f"{running.url}/nowhere")
        lines = http.get(f"{running.url}/metrics").text.splitlines()
        for line in (
            'shoal_requests_total{path="/v1/predict",status="200"} 1.0',
            'shoal_requests_total{path="other",status="404"} 1.0',
            'shoal_request_seconds_count{path="/v1/predict"} 1.0',
            "shoal_abstained_samples_total 12.0",
            "shoal_batch_samples_count 1.0",
            "shoal_batch_samples_sum 12.0",
            "shoal_queued_samples 0.0",
            "shoal_model_round 2.0",
            f'shoal_samples_total{{expert="{expert}"}} {sum(p["expert"] == expert for p in predictions)}.0',
        ):
            assert line in lines
