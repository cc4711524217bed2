"""Predictions over HTTP are exactly those of the method. Bad requests are refused with a problem."""

from __future__ import annotations

import io
import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from services import problem_detail, read_probabilities, running_server, to_npy

from shoal.serve.export import export, load_newest


def post(http, running, content, media="application/json", **parameters):
    headers = {"Content-Type": media}
    return http.post(f"{running.url}/v1/predict", content=content, headers=headers, params=parameters)


def ask(http, running, samples, **parameters):
    return http.post(f"{running.url}/v1/predict", json={"samples": np.asarray(samples).tolist()}, params=parameters)


def picture(pixels, kind="PNG", mode=None):
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("which", ["clustered", "routed"])
def test_json_and_npy_give_the_predictions_of_the_method(which, request, http, images, expected):
    running = request.getfixturevalue(which)
    right = expected(running.service.run_dir, images)
    for answer in (
        ask(http, running, images),
        ask(http, running, images[:, None]),
        post(http, running, to_npy(images), "application/x-npy"),
        post(http, running, to_npy(np.asfortranarray(images.astype(np.uint8))), "application/x-npy"),
    ):
        assert torch.allclose(read_probabilities(answer), right, atol=1e-6)
        labels = [row["label"] for row in answer.json()["predictions"]]
        assert labels == [str(k) for k in right.argmax(1).tolist()]
        assert answer.json()["round"] == 2


def test_one_sample_needs_no_list_around_it(clustered, http, images, expected):
    answer = ask(http, clustered, images[0])
    assert torch.allclose(read_probabilities(answer), expected(clustered.service.run_dir, images[:1]), atol=1e-6)


def test_prepared_values_are_not_prepared_again(clustered, http, images, expected):
    x = load_newest(clustered.service.run_dir).blueprint.inputs.preparation(images[:, None])
    answer = ask(http, clustered, x, prepared="true")
    assert torch.allclose(read_probabilities(answer), expected(clustered.service.run_dir, images), atol=1e-6)


def test_an_image_is_scaled_to_the_values_of_the_training_data(clustered, http, images, expected):
    bytes_of_255 = (images[3] * 255 / 16).round().astype(np.uint8)
    right = expected(clustered.service.run_dir, [bytes_of_255 * (16 / 255)])
    answer = post(http, clustered, picture(bytes_of_255), "image/png")
    assert torch.allclose(read_probabilities(answer), right, atol=1e-6)
    blurred = read_probabilities(post(http, clustered, picture(bytes_of_255, "JPEG"), "image/jpeg"))
    assert (blurred - right).abs().max() < 0.3


def test_the_response_names_the_model_of_each_sample(clustered, routed, http, images):
    version = load_newest(routed.service.run_dir)
    x = version.blueprint.inputs.preparation(images[:, None])
    routed_prediction = version.method.predict_routed(version.state.models, {}, x)
    rows = ask(http, routed, images).json()["predictions"]
    assert [row["expert"] for row in rows] == [f"expert-{k:03d}" for k in routed_prediction.model_index.tolist()]
    assert [row["routing_confidence"] for row in rows] == pytest.approx(routed_prediction.confidence.tolist(), abs=1e-6)
    assert [row["confidence"] for row in rows] == pytest.approx(
        routed_prediction.logits.softmax(-1).amax(-1).tolist(), abs=1e-6
    )
    one = ask(http, clustered, images[:1]).json()["predictions"][0]
    sizes = torch.stack(list(load_newest(clustered.service.run_dir).state.membership.values())).sum(0)
    assert one["expert"] == f"expert-{int(sizes.argmax()):03d}"
    assert one["routing_confidence"] is None


def test_a_method_with_one_model_names_no_expert(runs, http, images):
    with running_server(runs("fedavg")) as running:
        assert ask(http, running, images[:1]).json()["predictions"][0]["expert"] is None


@pytest.mark.parametrize("which", ["clustered", "routed"])
def test_a_client_of_the_run_is_served_the_expert_of_its_cluster(which, request, http, images, expected):
    clustered = request.getfixturevalue(which)
    membership = load_newest(clustered.service.run_dir).state.membership
    assert len({int(weights.argmax()) for weights in membership.values()}) > 1
    for client, weights in membership.items():
        answer = ask(http, clustered, images, client=client)
        assert torch.allclose(
            read_probabilities(answer), expected(clustered.service.run_dir, images, client), atol=1e-6
        )
        assert answer.json()["predictions"][0]["expert"] == f"expert-{int(weights.argmax()):03d}"
    assert "not a client of this run" in problem_detail(ask(http, clustered, images, client="c99"), 422)


def test_a_client_with_private_state_is_refused(runs, http, images):
    with running_server(runs("ditto")) as running:
        assert ask(http, running, images).status_code == 200
        assert "private state of the client" in problem_detail(ask(http, running, images, client="c1"), 409)


def test_samples_below_the_threshold_get_no_label(runs, clustered, http, images):
    sure = [row["confidence"] for row in ask(http, clustered, images).json()["predictions"]]
    threshold = sorted(sure)[5] + 1e-6
    rows = ask(http, clustered, images, abstain_below=threshold).json()["predictions"]
    assert [row["abstained"] for row in rows] == [confidence < threshold for confidence in sure]
    assert all((row["label"] is None) == row["abstained"] for row in rows)
    assert sum(row["abstained"] for row in rows) == 6
    with running_server(runs("ifca"), abstain_below=1.0) as running:
        assert all(row["abstained"] for row in ask(http, running, images).json()["predictions"])
        assert not any(row["abstained"] for row in ask(http, running, images, abstain_below=0).json()["predictions"])


@pytest.fixture(scope="module")
def table(runs, tmp_path_factory):
    """A run on a file of two columns, which has been deleted."""
    file = tmp_path_factory.mktemp("table") / "my.csv"
    rng = np.random.default_rng(0)
    values = rng.normal([1e6, 5], [3, 0.5], (200, 2))
    labels = np.where(values[:, 0] > 1e6, "high, or so", "low")
    rows = "".join(f'{a},{b},"{c}"\n' for (a, b), c in zip(values, labels, strict=True))
    file.write_text(f"far,near,label\n{rows}")
    run = runs("fedavg", data=str(file), clients=4, cohort=4, rounds=8, partition="iid")
    file.unlink()
    return run


def test_a_table_names_its_columns_and_is_standardised(table, http):
    with running_server(table) as running:
        answer = ask(http, running, [[1e6 + 6, 5], [1e6 - 6, 5]])
        assert [row["label"] for row in answer.json()["predictions"]] == ["high, or so", "low"]
        assert "must have the shape 2 for one sample (far, near), or N x 2 for N samples" in problem_detail(
            ask(http, running, [[1.0, 2, 3]]), 422
        )
        pixels = picture(np.zeros((8, 8), np.uint8))
        assert "is an image, but" in problem_detail(post(http, running, pixels, "image/png"), 422)
        assert http.get(f"{running.url}/v1/models").json()["columns"] == ["far", "near"]
        described = http.get(f"{running.url}/openapi.json").json()["paths"]["/v1/predict"]["post"]
        assert "in this order: far, near." in described["description"]
        content = described["requestBody"]["content"]
        assert list(content) == ["application/json", "application/x-npy"]
        example = content["application/json"]["example"]
        assert example["samples"][0] == pytest.approx([1e6, 5], rel=0.05)
        assert http.post(f"{running.url}/v1/predict", json=example).status_code == 200
        sentence = problem_detail(post(http, running, b"far", "text/csv"), 415)
        assert sentence.endswith("must be one of application/json, application/x-npy.")


def test_the_columns_of_a_table_go_with_its_onnx_file(table, tmp_path):
    made = export(table, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["shoal.columns"]) == ["far", "near"]
    assert json.loads(facts["shoal.classes"]) == ["high, or so", "low"]
    assert json.loads(facts["shoal.round"]) == 8


def test_images_may_be_sent_if_samples_are_images(clustered, http):
    described = http.get(f"{clustered.url}/openapi.json").json()["paths"]["/v1/predict"]["post"]
    assert list(described["requestBody"]["content"])[2:] == ["image/png", "image/jpeg"]
    assert "PNG or JPEG" in described["description"]
    assert http.get(f"{clustered.url}/v1/models").json()["columns"] is None


def test_an_unseen_client_is_refused_by_name(runs, http, images):
    run = runs("ifca", unseen=2)
    (client, _) = json.loads((run / "partition.json").read_text())["unseen"]
    with running_server(run) as running:
        sentence = problem_detail(ask(http, running, images, client=client), 422)
        assert f"client is {client!r}, which is an unseen client" in sentence
        assert "Leave client out" in sentence
        assert ask(http, running, images).status_code == 200


def bomb():
    """Returns a PNG whose header announces 50,000 x 50,000 pixels."""
    image = bytearray(picture(np.zeros((8, 8), np.uint8)))
    image[16:24] = (50_000).to_bytes(4, "big") * 2
    return bytes(image)


GREY = np.zeros((8, 8), np.uint8)
NAN = np.full((1, 8, 8), np.nan)
BAD = {
    "not json": (b"{", "application/json", 400, "not JSON"),
    "deep": (b"[" * 100_000, "application/json", 400, "not JSON"),
    "no samples": (b"[[1, 2]]", "application/json", 422, 'one key "samples"'),
    "another key": (b'{"samples": [1], "row": [1]}', "application/json", 422, 'one key "samples"'),
    "empty": (
        b'{"samples": []}',
        "application/json",
        422,
        "must have the shape 1 x 8 x 8 for one sample, or N x 1 x 8 x 8",
    ),
    "ragged": (b'{"samples": [[1, 2], [3]]}', "application/json", 422, "differ in length"),
    "words": (b'{"samples": [["a"]]}', "application/json", 422, "must be numbers"),
    "truth": (
        b'{"samples": [[' + b"[true, 1, 0, 0, 0, 0, 0, 0]," * 7 + b"[0, 0, 0, 0, 0, 0, 0, false]]]}",
        "application/json",
        422,
        "has true or false",
    ),
    "null": (b'{"samples": [null]}', "application/json", 422, "must be numbers"),
    "huge": (b'{"samples": [1' + b"0" * 400 + b"]}", "application/json", 422, "must be"),
    "no body": (b"", "application/json", 400, "not JSON"),
    "wrong shape": (
        to_npy(np.zeros((2, 7, 8))),
        "application/x-npy",
        422,
        "2 x 7 x 8. It must have the shape 1 x 8 x 8",
    ),
    "nan": (to_npy(NAN), "application/x-npy", 422, "samples[0][0][0][0] is nan. It must be a finite number"),
    "infinite": (b'{"samples": [[Infinity]]}', "application/json", 422, "the shape 1 x 1"),
    "too large": (to_npy(np.full((1, 8, 8), 1e31)), "application/x-npy", 422, "at most 1e+30"),
    "too many": (to_npy(np.zeros((1025, 8, 8), np.uint8)), "application/x-npy", 422, "has 1025 samples"),
    "none": (to_npy(np.zeros((0, 8, 8))), "application/x-npy", 422, "has 0 samples"),
    "complex": (to_npy(np.zeros((1, 8, 8), complex)), "application/x-npy", 422, "of numbers"),
    "text": (to_npy(np.array(["a"])), "application/x-npy", 422, "of numbers"),
    "not npy": (b"\x80\x04K\x01.", "application/x-npy", 400, "not a .npy array"),
    "cut npy": (to_npy(np.zeros((1, 8, 8)))[:-9], "application/x-npy", 400, "bytes after its header"),
    "not an image": (b"GIF89a", "image/png", 400, "not a complete PNG image: it has no header of one"),
    "another format": (picture(GREY, "JPEG"), "image/png", 400, "not a complete PNG"),
    "cut image": (
        picture(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8))[:60],
        "image/png",
        400,
        "complete",
    ),
    "size": (picture(np.zeros((9, 8), np.uint8)), "image/png", 422, "is an image of 8 x 9 grey. It must be 8 x 8 grey"),
    "mode": (
        picture(np.zeros((8, 8, 3), np.uint8)),
        "image/png",
        422,
        "is an image of 8 x 8 in colour. It must be 8 x 8 grey",
    ),
    "bomb": (bomb(), "image/png", 400, "not a complete PNG"),
    "type": (b"rows", "text/plain", 415, "must be one of application/json"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused(name, clustered, http, images):
    content, media, status, sentence = BAD[name]
    answer = post(http, clustered, content, media)
    assert sentence in problem_detail(answer, status)
    assert "0x" not in answer.text
    assert ask(http, clustered, images[:1]).status_code == 200


def test_an_array_of_python_objects_is_refused(clustered, http):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x80\x04N."
    assert "type object" in problem_detail(post(http, clustered, content, "application/x-npy"), 422)


def test_prepared_values_that_are_too_large_are_refused(clustered, http):
    rows = np.full((1, 8, 8), 3e38)
    assert "at most 1e+30" in problem_detail(ask(http, clustered, rows, prepared="true"), 422)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"abstain_below": "2"}, "abstain_below is '2': input should be less than or equal to 1"),
        ({"abstain_below": "x"}, "abstain_below is 'x': input should be a valid number"),
        ({"prepared": "perhaps"}, "prepared is 'perhaps'"),
        ({"abstain": "0.5"}, "The parameter 'abstain' is unknown. It must be one of client, prepared, abstain_below"),
    ],
)
def test_parameters_are_checked(parameters, sentence, clustered, http, images):
    assert sentence in problem_detail(ask(http, clustered, images, **parameters), 422)


def test_other_paths_and_methods_are_problems_too(clustered, http):
    assert "GET /openapi.json" in problem_detail(http.get(f"{clustered.url}/v2/predict"), 404)
    answer = http.get(f"{clustered.url}/v1/predict")
    assert "It supports POST" in problem_detail(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_an_internal_error_reveals_no_details(runs, http, images, monkeypatch):
    with running_server(runs("ifca")) as running:
        monkeypatch.setattr(running.service.version, "predict_batch", lambda requests: 1 / 0)
        assert "division" not in problem_detail(ask(http, running, images), 500)
        monkeypatch.undo()
        assert ask(http, running, images).status_code == 200
