"""What else there is: models to fetch, clusters to belong to, figures to watch."""

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


def test_models_are_listed_and_fetched(grouped, http):
    state = load_newest(grouped.service.run).state
    listed = http.get(f"{grouped.url}/v1/models").json()
    assert listed["round"] == 2
    assert listed["method"] == "ifca"
    assert listed["input_shape"] == [1, 8, 8]
    assert [m["id"] for m in listed["models"]] == ["served", *sorted(state.models)]
    for facts in listed["models"]:
        answer = http.get(f"{grouped.url}/v1/models/{facts['id']}")
        assert answer.status_code == 200
        assert len(answer.content) == facts["bytes"]
        models, _ = unpack(answer.content)
        right = grouped.service.version.models(facts["id"])
        assert tree.max_abs_difference(models, right) == 0
        assert sum(x.numel() for x in tree.leaves(models)) == facts["parameters"]


def test_what_a_client_is_served_can_be_fetched(grouped, http):
    version = load_newest(grouped.service.run)
    for client in version.state.membership:
        models, facts = unpack(http.get(f"{grouped.url}/v1/models/served", params={"client": client}).content)
        assert tree.max_abs_difference(models, version.method.models_for(version.state, client)) == 0
        assert facts["expert"] == version.served_models(client).expert
    sentence = problem_detail(http.get(f"{grouped.url}/v1/models/expert-000", params={"client": client}), 404)
    assert "model expert-000 is the same for everybody: leave client out, or ask for served" in sentence


def test_a_file_says_nothing_of_where_data_lie(grouped, http):
    _, facts = unpack(http.get(f"{grouped.url}/v1/models/served").content)
    assert set(facts) == {"job", "inputs", "expert", "round"}
    assert not {"data", "partition", "seed", "label_column"} & set(facts["job"])
    assert str(grouped.service.run) not in json.dumps(facts)


def test_who_has_a_model_already_is_not_sent_it_again(grouped, http):
    url = f"{grouped.url}/v1/models/expert-001"
    first = http.get(url)
    etag = first.headers["etag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = http.get(url, headers={"If-None-Match": known})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == etag
    assert http.get(url, headers={"If-None-Match": '"other"'}).status_code == 200
    assert http.get(f"{grouped.url}/v1/models/expert-000").headers["etag"] != etag
    head = http.head(url)
    assert head.headers["etag"] == etag
    assert head.headers["content-length"] == str(len(first.content))
    assert head.content == b""


def test_the_list_of_models_has_an_etag_too(grouped, http):
    url = f"{grouped.url}/v1/models"
    first = http.get(url)
    again = http.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = http.head(url)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "shoal-round"):
        assert head.headers[name] == first.headers[name]


def test_a_model_that_is_not_there(grouped, http):
    sentence = problem_detail(http.get(f"{grouped.url}/v1/models/expert-999"), 404)
    assert "there is no model 'expert-999'; it must be one of served, expert-000" in sentence
    problem_detail(http.get(f"{grouped.url}/v1/models/..%2f..%2fconfig.json"), 404)


GROUPS = {"partition": "labels:0-2/3-5/6-9", "clients": 9, "cohort": 9}


@pytest.mark.parametrize("method", ["fedepc", "fedgroup", "scmoe", "clsm-fl"])
def test_who_tells_what_a_client_told_belongs_where_it_belongs(method, runs, http):
    run = runs(method, **GROUPS, rounds=3)
    state = load_newest(run).state
    kept = state.memory["train" if method in ("scmoe", "clsm-fl") else "cluster"]
    known = ClientTable.from_tree(kept.get("known", kept))
    if method == "fedgroup":
        vectors = dict(zip(sorted(state.models), kept["directions"], strict=True))
        right = dict(zip(vectors, torch.eye(len(vectors)), strict=True))
    else:
        column = {"fedepc": "rows", "scmoe": "direction", "clsm-fl": "able"}[method]
        vectors = dict(zip(known.clients, known[column], strict=True))
        right = {c: state.membership[c] for c in vectors}
    with running_server(run) as running:
        agreeing = 0
        for who, vector in vectors.items():
            answer = http.post(f"{running.url}/v1/clusters/assign", json={"representation": vector.tolist()})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert list(found["memberships"]) == sorted(state.models)
            assert sum(found["memberships"].values()) == pytest.approx(1)
            assert found["memberships"][found["nearest"]] == max(found["memberships"].values())
            agreeing += (
                float(right[who][sorted(state.models).index(found["nearest"])]) >= float(right[who].max()) - 1e-6
            )
        assert agreeing >= 0.7 * len(vectors)


def test_fuzzy_memberships_are_those_of_the_training(runs):
    run = runs("clsm-fl", **GROUPS, rounds=3)
    version = load_newest(run)
    known = ClientTable.from_tree(version.state.memory["train"]["known"])
    for client, vector in zip(known.clients, known["able"], strict=True):
        found = cluster_memberships(version.method, version.state, vector.tolist())
        assert list(found.values()) == pytest.approx(version.state.membership[client].tolist(), abs=0.02)


def test_vectors_that_cannot_be_compared(runs, grouped, http):
    sentence = problem_detail(http.post(f"{grouped.url}/v1/clusters/assign", json={"representation": [1, 2]}), 409)
    assert "ifca keeps no representations of clusters" in sentence
    with running_server(runs("fedepc", **GROUPS, rounds=3)) as running:
        url = f"{running.url}/v1/clusters/assign"
        assert "has 2 numbers, but must have 120" in problem_detail(
            http.post(url, json={"representation": [0, 1]}), 422
        )
        assert "between 0 and 1" in problem_detail(http.post(url, json={"representation": [2.0] * 120}), 422)
        assert "true and false" in problem_detail(http.post(url, json={"representation": [True] + [0.5] * 119}), 422)
        assert "array of numbers" in problem_detail(http.post(url, json={"representation": ["a"] * 120}), 422)
        assert "field required" in problem_detail(http.post(url, json={}), 422)
        assert "not JSON" in problem_detail(
            http.post(url, content=b"{", headers={"Content-Type": "application/json"}), 400
        )


def test_what_happens_is_counted(runs, http, images):
    with running_server(runs("ensembles:ensemble")) as running:
        rows = {"rows": images.tolist()}
        said = http.post(f"{running.url}/v1/predict", json=rows, params={"abstain_below": 1}).json()["answers"]
        http.get(f"{running.url}/nowhere")
        lines = http.get(f"{running.url}/metrics").text.splitlines()
        for line in (
            'shoal_requests_total{path="/v1/predict",status="200"} 1.0',
            'shoal_requests_total{path="other",status="404"} 1.0',
            'shoal_request_seconds_count{path="/v1/predict"} 1.0',
            "shoal_abstained_rows_total 12.0",
            "shoal_batch_rows_count 1.0",
            "shoal_batch_rows_sum 12.0",
            "shoal_queued_rows 0.0",
            "shoal_model_round 2.0",
            f'shoal_rows_total{{expert="{said[0]["expert"]}"}} {sum(r["expert"] == said[0]["expert"] for r in said)}.0',
        ):
            assert line in lines
