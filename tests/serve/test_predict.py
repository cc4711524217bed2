"""What is asked and what is answered: exactly what the method itself would say."""

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


def ask(http, running, rows, **parameters):
    return http.post(f"{running.url}/v1/predict", json={"rows": np.asarray(rows).tolist()}, params=parameters)


def picture(pixels, kind="PNG", mode=None):
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("which", ["grouped", "routed"])
def test_json_and_npy_are_answered_as_the_method_predicts(which, request, http, images, expected):
    running = request.getfixturevalue(which)
    right = expected(running.service.run, images)
    for answer in (
        ask(http, running, images),
        ask(http, running, images[:, None]),
        post(http, running, to_npy(images), "application/x-npy"),
        post(http, running, to_npy(np.asfortranarray(images.astype(np.uint8))), "application/x-npy"),
    ):
        assert torch.allclose(read_probabilities(answer), right, atol=1e-6)
        labels = [row["label"] for row in answer.json()["answers"]]
        assert labels == [str(k) for k in right.argmax(1).tolist()]
        assert answer.json()["round"] == 2


def test_one_row_needs_no_list_around_it(grouped, http, images, expected):
    answer = ask(http, grouped, images[0])
    assert torch.allclose(read_probabilities(answer), expected(grouped.service.run, images[:1]), atol=1e-6)


def test_prepared_values_are_taken_as_they_are(grouped, http, images, expected):
    x = load_newest(grouped.service.run).blueprint.inputs.preparation(images[:, None])
    answer = ask(http, grouped, x, prepared="true")
    assert torch.allclose(read_probabilities(answer), expected(grouped.service.run, images), atol=1e-6)


def test_an_image_is_scaled_to_the_values_of_the_training_data(grouped, http, images, expected):
    bytes_of_255 = (images[3] * 255 / 16).round().astype(np.uint8)
    right = expected(grouped.service.run, [bytes_of_255 * (16 / 255)])
    answer = post(http, grouped, picture(bytes_of_255), "image/png")
    assert torch.allclose(read_probabilities(answer), right, atol=1e-6)
    blurred = read_probabilities(post(http, grouped, picture(bytes_of_255, "JPEG"), "image/jpeg"))
    assert (blurred - right).abs().max() < 0.3


def test_who_answered_is_said(grouped, routed, http, images):
    version = load_newest(routed.service.run)
    x = version.blueprint.inputs.preparation(images[:, None])
    said = version.method.predict_routed(version.state.models, {}, x)
    rows = ask(http, routed, images).json()["answers"]
    assert [row["expert"] for row in rows] == [f"expert-{k:03d}" for k in said.model_index.tolist()]
    assert [row["score"] for row in rows] == pytest.approx(said.confidence.tolist(), abs=1e-6)
    assert [row["confidence"] for row in rows] == pytest.approx(said.logits.softmax(-1).amax(-1).tolist(), abs=1e-6)
    one = ask(http, grouped, images[:1]).json()["answers"][0]
    sizes = torch.stack(list(load_newest(grouped.service.run).state.membership.values())).sum(0)
    assert one["expert"] == f"expert-{int(sizes.argmax()):03d}"
    assert one["score"] is None


def test_a_method_with_one_model_names_no_expert(runs, http, images):
    with running_server(runs("fedavg")) as running:
        assert ask(http, running, images[:1]).json()["answers"][0]["expert"] is None


@pytest.mark.parametrize("which", ["grouped", "routed"])
def test_a_client_of_the_run_is_served_its_clusters_model(which, request, http, images, expected):
    grouped = request.getfixturevalue(which)
    membership = load_newest(grouped.service.run).state.membership
    assert len({int(weights.argmax()) for weights in membership.values()}) > 1
    for client, weights in membership.items():
        answer = ask(http, grouped, images, client=client)
        assert torch.allclose(read_probabilities(answer), expected(grouped.service.run, images, client), atol=1e-6)
        assert answer.json()["answers"][0]["expert"] == f"expert-{int(weights.argmax()):03d}"
    assert "no client of this run" in problem_detail(ask(http, grouped, images, client="c99"), 422)


def test_what_is_private_is_not_pretended_to_be_here(runs, http, images):
    with running_server(runs("ditto")) as running:
        assert ask(http, running, images).status_code == 200
        assert "keep to themselves" in problem_detail(ask(http, running, images, client="c1"), 409)


def test_rows_below_the_threshold_get_no_label(runs, grouped, http, images):
    sure = [row["confidence"] for row in ask(http, grouped, images).json()["answers"]]
    threshold = sorted(sure)[5] + 1e-6
    rows = ask(http, grouped, images, abstain_below=threshold).json()["answers"]
    assert [row["abstained"] for row in rows] == [confidence < threshold for confidence in sure]
    assert all((row["label"] is None) == row["abstained"] for row in rows)
    assert sum(row["abstained"] for row in rows) == 6
    with running_server(runs("ifca"), abstain_below=1.0) as running:
        assert all(row["abstained"] for row in ask(http, running, images).json()["answers"])
        assert not any(row["abstained"] for row in ask(http, running, images, abstain_below=0).json()["answers"])


@pytest.fixture(scope="module")
def table(runs, tmp_path_factory):
    """A run on a file of two columns, which is gone."""
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
        assert [row["label"] for row in answer.json()["answers"]] == ["high, or so", "low"]
        assert "must be 2 for one row (far, near), or N x 2 for N" in problem_detail(
            ask(http, running, [[1.0, 2, 3]]), 422
        )
        pixels = picture(np.zeros((8, 8), np.uint8))
        assert "not images" in problem_detail(post(http, running, pixels, "image/png"), 422)
        assert http.get(f"{running.url}/v1/models").json()["columns"] == ["far", "near"]
        described = http.get(f"{running.url}/openapi.json").json()["paths"]["/v1/predict"]["post"]
        assert "in this order: far, near." in described["description"]
        content = described["requestBody"]["content"]
        assert list(content) == ["application/json", "application/x-npy"]
        example = content["application/json"]["example"]
        assert example["rows"][0] == pytest.approx([1e6, 5], rel=0.05)
        assert http.post(f"{running.url}/v1/predict", json=example).status_code == 200
        sentence = problem_detail(post(http, running, b"far", "text/csv"), 415)
        assert sentence.endswith("must be one of application/json, application/x-npy")


def test_the_columns_of_a_table_go_with_its_onnx_file(table, tmp_path):
    made = export(table, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["shoal.columns"]) == ["far", "near"]
    assert json.loads(facts["shoal.classes"]) == ["high, or so", "low"]
    assert json.loads(facts["shoal.round"]) == 8


def test_images_may_be_sent_where_rows_are_images(grouped, http):
    described = http.get(f"{grouped.url}/openapi.json").json()["paths"]["/v1/predict"]["post"]
    assert list(described["requestBody"]["content"])[2:] == ["image/png", "image/jpeg"]
    assert "PNG or JPEG" in described["description"]
    assert http.get(f"{grouped.url}/v1/models").json()["columns"] is None


def test_who_was_held_out_is_asked_for_without_its_name(runs, http, images):
    run = runs("ifca", unseen=2)
    (held, _) = json.loads((run / "partition.json").read_text())["unseen"]
    with running_server(run) as running:
        sentence = problem_detail(ask(http, running, images, client=held), 422)
        assert f"client is {held!r}, which was held out and never trained" in sentence
        assert "leave client out" in sentence
        assert ask(http, running, images).status_code == 200


def bomb():
    """A PNG whose header announces 50,000 x 50,000 pixels."""
    whole = bytearray(picture(np.zeros((8, 8), np.uint8)))
    whole[16:24] = (50_000).to_bytes(4, "big") * 2
    return bytes(whole)


GREY = np.zeros((8, 8), np.uint8)
NAN = np.full((1, 8, 8), np.nan)
BAD = {
    "not json": (b"{", "application/json", 400, "not JSON"),
    "deep": (b"[" * 100_000, "application/json", 400, "not JSON"),
    "no rows": (b"[[1, 2]]", "application/json", 422, 'one key "rows"'),
    "another key": (b'{"rows": [1], "row": [1]}', "application/json", 422, 'one key "rows"'),
    "empty": (b'{"rows": []}', "application/json", 422, "must be 1 x 8 x 8 for one row, or N x 1 x 8 x 8"),
    "ragged": (b'{"rows": [[1, 2], [3]]}', "application/json", 422, "differ in length"),
    "words": (b'{"rows": [["a"]]}', "application/json", 422, "must be numbers"),
    "truth": (
        b'{"rows": [[' + b"[true, 1, 0, 0, 0, 0, 0, 0]," * 7 + b"[0, 0, 0, 0, 0, 0, 0, false]]]}",
        "application/json",
        422,
        "true and false are no numbers",
    ),
    "null": (b'{"rows": [null]}', "application/json", 422, "must be numbers"),
    "huge": (b'{"rows": [1' + b"0" * 400 + b"]}", "application/json", 422, "must be"),
    "no body": (b"", "application/json", 400, "not JSON"),
    "wrong shape": (to_npy(np.zeros((2, 7, 8))), "application/x-npy", 422, "2 x 7 x 8, but must be 1 x 8 x 8"),
    "nan": (to_npy(NAN), "application/x-npy", 422, "rows[0][0][0][0] is nan; it must be a finite number"),
    "infinite": (b'{"rows": [[Infinity]]}', "application/json", 422, "the shape is 1 x 1"),
    "too large": (to_npy(np.full((1, 8, 8), 1e31)), "application/x-npy", 422, "at most 1e+30"),
    "too many": (to_npy(np.zeros((1025, 8, 8), np.uint8)), "application/x-npy", 422, "there are 1025"),
    "none": (to_npy(np.zeros((0, 8, 8))), "application/x-npy", 422, "there are 0"),
    "complex": (to_npy(np.zeros((1, 8, 8), complex)), "application/x-npy", 422, "of numbers"),
    "text": (to_npy(np.array(["a"])), "application/x-npy", 422, "of numbers"),
    "not npy": (b"\x80\x04K\x01.", "application/x-npy", 400, "not an .npy array"),
    "cut npy": (to_npy(np.zeros((1, 8, 8)))[:-9], "application/x-npy", 400, "bytes follow the header"),
    "not an image": (b"GIF89a", "image/png", 400, "not a whole PNG image: it does not begin like one"),
    "another format": (picture(GREY, "JPEG"), "image/png", 400, "not a whole PNG"),
    "cut image": (picture(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8))[:60], "image/png", 400, "whole"),
    "size": (picture(np.zeros((9, 8), np.uint8)), "image/png", 422, "is 8 x 9 grey, but must be 8 x 8 grey"),
    "mode": (picture(np.zeros((8, 8, 3), np.uint8)), "image/png", 422, "is 8 x 8 in colour, but must be 8 x 8 grey"),
    "bomb": (bomb(), "image/png", 400, "not a whole PNG"),
    "type": (b"rows", "text/plain", 415, "must be one of application/json"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_model_can_be_given_is_refused_in_a_sentence(name, grouped, http, images):
    content, media, status, sentence = BAD[name]
    answer = post(http, grouped, content, media)
    assert sentence in problem_detail(answer, status)
    assert "0x" not in answer.text
    assert ask(http, grouped, images[:1]).status_code == 200


def test_an_array_of_python_objects_is_refused(grouped, http):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x80\x04N."
    assert "type object" in problem_detail(post(http, grouped, content, "application/x-npy"), 422)


def test_values_without_an_answer_are_said_so(grouped, http):
    rows = np.full((1, 8, 8), 3e38)
    assert "at most 1e+30" in problem_detail(ask(http, grouped, rows, prepared="true"), 422)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"abstain_below": "2"}, "abstain_below is '2': input should be less than or equal to 1"),
        ({"abstain_below": "x"}, "abstain_below is 'x': input should be a valid number"),
        ({"prepared": "perhaps"}, "prepared is 'perhaps'"),
        ({"abstain": "0.5"}, "parameter 'abstain' is not known; it must be one of client, prepared, abstain_below"),
    ],
)
def test_parameters_are_checked(parameters, sentence, grouped, http, images):
    assert sentence in problem_detail(ask(http, grouped, images, **parameters), 422)


def test_other_paths_and_methods_are_problems_too(grouped, http):
    assert "GET /openapi.json" in problem_detail(http.get(f"{grouped.url}/v2/predict"), 404)
    answer = http.get(f"{grouped.url}/v1/predict")
    assert "it takes POST" in problem_detail(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_fault_of_ours_says_nothing_of_the_inside(runs, http, images, monkeypatch):
    with running_server(runs("ifca")) as running:
        monkeypatch.setattr(running.service.version, "answer", lambda asked: 1 / 0)
        assert "division" not in problem_detail(ask(http, running, images), 500)
        monkeypatch.undo()
        assert ask(http, running, images).status_code == 200
