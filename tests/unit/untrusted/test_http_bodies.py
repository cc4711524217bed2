"""Bodies and parameters of requests may be anything: the service predicts, or responds with a problem below 500."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from services import to_npy
from untrusted import damaged, mutated_texts, peak_bytes, seeded, to_bytes

from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.serve.app import Service, make_app
from shoal.serve.inputs import Inputs, InvalidInput

SMALL = {"method": "fedepc", "clients": 6, "cohort": 3, "rounds": 2, "epochs": 1, "fleet": "vector"}


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    """Returns a function that sends a request to the application itself, and returns its response."""
    from starlette.testclient import TestClient

    run = tmp_path_factory.mktemp("runs") / "run"
    run_job(Job(**SMALL), run)
    with TestClient(make_app(Service(run)), raise_server_exceptions=False) as client:
        yield client.post


def check(response: httpx.Response) -> None:
    """Checks that a response is a result or a problem of one sentence, and no internal error."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        detail = response.json()["detail"]
        assert response.headers["content-type"] == "application/problem+json"
        assert "\n" not in detail and len(detail) < 1000, detail


SAMPLE = np.zeros((8, 8))
JSON = json.dumps({"samples": SAMPLE.tolist()}).encode()
IMAGE = to_bytes(lambda f: Image.new("L", (8, 8)).save(f, "png"))
JPEG = to_bytes(lambda f: Image.new("L", (8, 8)).save(f, "jpeg"))
BODIES = {
    "application/json": JSON,
    "application/x-npy": to_npy(SAMPLE),
    "image/png": IMAGE,
    "image/jpeg": JPEG,
    "": JSON,
    "text/plain": JSON,
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("media", BODIES)
@seeded(50)
@given(drawn=st.data())
def test_damaged_bodies(post, media, drawn):
    body = drawn.draw(damaged(BODIES[media]))
    check(post("/v1/predict", content=body, headers={"content-type": media}))


@seeded(80)
@given(json_values, st.booleans())
def test_json_of_any_value(post, value, is_samples):
    body = json.dumps({"samples": value} if is_samples else value)
    check(post("/v1/predict", content=body, headers={"content-type": "application/json"}))
    body = json.dumps({"representation": value} if is_samples else value)
    check(post("/v1/clusters/assign", content=body, headers={"content-type": "application/json"}))


@seeded(60)
@given(
    st.dictionaries(
        st.sampled_from(["client", "prepared", "abstain_below", "label_counts", "x"]),
        mutated_texts(["1", "0.5", ",", "nan", "true", "c01", "-1", "1e999", "\0"], joiners=("",)),
        max_size=3,
    )
)
def test_parameters_of_any_text(post, parameters):
    check(post("/v1/predict", content=JSON, params=parameters, headers={"content-type": "application/json"}))


# --- Bodies that are small, and that a reader could make large -------------------------------------------------------


def npy(header: str, payload: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode() + payload


MIB = 2**20
HOSTILE = {
    "one long text and many numbers": ("json", b'{"samples": ["' + b"x" * MIB + b'"' + b",0" * 1000 + b"]}"),
    "nested lists": ("json", b'{"samples": ' + b"[" * MIB),
    "closed nested lists": ("json", b'{"samples": ' + b"[" * 150 + b"]" * 150 + b"}"),
    "a number of many digits": ("json", b'{"samples": ' + b"1" * MIB + b"}"),
    "10 GB in an npy header": (
        "npy",
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1250000000,)}", bytes(8)),
    ),
    "no samples of endless size": ("npy", npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': (0, {2**80})}}")),
    "an npy header of 4 GB": ("npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"),
    "a nested npy header": ("npy", npy("(" * 9000)),
    "an npy header that is no Python": ("npy", npy("{'descr': '<f8', '\n\n'''")),
    "an npy header of a negative number": ("npy", npy("-" * 9000 + "1")),
    "an npy header of other keys": ("npy", npy("{1: 2, 'a': 3}")),
    "an npy header with a list as a key": ("npy", npy("{[]: 2}")),
    "objects in an npy file": ("npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n")),
    "an image of 900 million pixels": (
        "png",
        IMAGE.replace(bytes([0, 0, 0, 8, 0, 0, 0, 8]), bytes([0, 0, 117, 48] * 2)),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_in_bounded_memory(post, name):
    kind, body = HOSTILE[name]
    media = {"json": "application/json", "npy": "application/x-npy", "png": "image/png"}[kind]
    responses = []
    request = {"content": body, "headers": {"content-type": media}}
    assert peak_bytes(lambda: responses.append(post("/v1/predict", **request))) < 64 * MIB
    assert responses[0].status_code in (400, 422), responses[0].text
    check(responses[0])
    if kind == "json":
        check(
            post("/v1/clusters/assign", content=body.replace(b"samples", b"representation"), headers=request["headers"])
        )


@seeded(200)
@given(damaged(to_npy(SAMPLE), to_npy(SAMPLE.astype(">i2"))))
def test_npy_arrays_of_any_bytes(body):
    try:
        Inputs((1, 8, 8), ("a", "b")).read_npy(body)
    except InvalidInput as error:
        assert str(error).isprintable() and len(str(error)) < 1000
