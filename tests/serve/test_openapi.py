"""The responses of the service match its OpenAPI description for any request."""

from __future__ import annotations

import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from services import running_server, to_npy

from shoal.serve.admission import Limits

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_schema_conformance, response_headers_conformance),
]
HEALTH = ["/healthz", "/readyz", "/metrics"]
PATHS = ["/v1/predict", "/v1/prior", "/v1/clusters/assign", "/v1/models", "/v1/models/{id}", *HEALTH]
CASES = [*(("running", path) for path in PATHS), ("prior_service", "/v1/predict"), ("prior_service", "/v1/prior")]

BODIES = st.one_of(st.binary(max_size=200), st.just(to_npy(np.ones((2, 8, 8)))))
for media in ("application/x-npy", "image/png", "image/jpeg"):
    schemathesis.openapi.media_type(media, BODIES)


@pytest.fixture(scope="module")
def running(runs):
    with running_server(runs("ensembles:ensemble"), limits=Limits(requests_per_s=0)) as service:
        yield service


@pytest.fixture(scope="module")
def prior_service(runs):
    """A service of a method that uses label counts."""
    with running_server(runs("shoal"), limits=Limits(requests_per_s=0)) as service:
        yield service


@pytest.fixture(scope="module")
def description(running, http):
    return http.get(f"{running.url}/openapi.json").json()


def test_every_path_is_described_with_its_errors(description):
    assert sorted(description["paths"]) == sorted(PATHS)
    for path in description["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"]


def test_the_example_is_valid(running, description, http):
    example = description["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert http.post(f"{running.url}/v1/predict", json=example).status_code == 200


@pytest.mark.parametrize(("service", "path"), CASES)
def test_the_response_to_any_request_is_as_described(service, path, http, request):
    running = request.getfixturevalue(service)
    description = http.get(f"{running.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(description)
    operation = next(iter(schema[path].values()))
    kinds = [operation.as_strategy(GenerationMode.POSITIVE)]
    if operation.method == "post" or operation.query:  # other requests have nothing that could be wrong
        kinds.append(operation.as_strategy(GenerationMode.NEGATIVE))
    statuses = set()

    @settings(
        max_examples=40 if operation.method == "post" else 15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(kinds))
    def check(case):
        statuses.add(case.call_and_validate(base_url=running.url, checks=CHECKS, session=session).status_code)

    with requests.Session() as session:
        session.trust_env = False
        check()
    assert statuses
    if path == "/v1/predict" or (service, path) == ("prior_service", "/v1/prior"):
        assert {200, 400, 422} <= statuses
