"""Exported files give the logits of the models of the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from shoal.cli import app
from shoal.codec import unpack
from shoal.errors import UserError
from shoal.serve import export as exporting
from shoal.serve.export import export, load_newest
from shoal.store.reader import read_run


def logits(run, images, cluster=None):
    """Returns the logits of raw images, by the method itself."""
    version = load_newest(run)
    x = version.blueprint.inputs.preparation(images[:, None])
    with torch.no_grad():
        if cluster is not None:
            return version.blueprint.model.predict(version.state.models[cluster], x)
        return version.method.predict(version.method.models_for(version.state, None), {}, x)


@pytest.mark.parametrize(("method", "cluster"), [("ifca", None), ("ifca", "1"), ("ensembles:ensemble", None)])
@pytest.mark.parametrize("format", ["onnx", "torchscript", "safetensors"])
def test_a_file_gives_the_logits_of_the_model(format, method, cluster, runs, images, tmp_path):
    run = runs(method)
    exported = export(run, format, tmp_path / f"model{exporting.FORMATS[format].output_kind.ending}", cluster)
    assert exported.max_logit_difference < 1e-5
    assert exported.round == 2
    assert exported.num_bytes == exported.path.stat().st_size
    right = logits(run, images, exported.model_name if cluster else None)
    raw = images[:, None].astype(np.float32)
    assert exported.has_dynamic_batch == (
        method == "ifca" or format == "safetensors"
    )  # the ensemble depends on the number of samples
    if not exported.has_dynamic_batch:
        raw, right = raw[:1], right[:1]
    if format == "onnx":
        session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(["logits"], {"rows": raw})[0])
        facts = session.get_modelmeta().custom_metadata_map
        assert json.loads(facts["shoal.classes"]) == list("0123456789")
        assert "shoal.columns" not in facts
    elif format == "torchscript":
        extra = {"shoal.json": ""}
        found = torch.jit.load(exported.path, _extra_files=extra)(torch.from_numpy(raw))
        assert json.loads(extra["shoal.json"]) == {"classes": list("0123456789"), "round": 2}
    else:
        models, facts = unpack(exported.path.read_bytes())
        version = load_newest(run)
        found = version.method.predict(models, {}, version.blueprint.inputs.to_tensor(images))
        assert facts["round"] == 2
    assert torch.allclose(found, right, atol=1e-5)


def test_a_network_of_convolutions(runs, images, tmp_path):
    run = runs("fedavg", model="networks:SmallBatchNorm", rounds=1)
    exported = export(run, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    found = session.run(None, {"rows": images[:, None].astype(np.float32)})[0]
    assert torch.allclose(torch.from_numpy(found), logits(run, images), atol=1e-4)


def test_a_file_with_other_logits_is_not_written(runs, tmp_path, monkeypatch):
    def other(version, name, module):
        return exporting.EncodedModel(b"x", lambda x: module(x) + 1)

    monkeypatch.setitem(exporting.FORMATS, "safetensors", replace(exporting.FORMATS["safetensors"], encode=other))
    with pytest.raises(UserError, match="logits would differ by 1 from"):
        export(runs("ifca"), "safetensors", tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_command(runs, tmp_path):
    run = runs("ifca")

    def shoal(*words):
        return CliRunner().invoke(app, ["export", str(run), *words])

    result = shoal(
        "--format", "safetensors", "--cluster", "expert-000", "--out", str(tmp_path / "a.safetensors"), "--json"
    )
    facts = json.loads(result.stdout)
    assert facts["model_name"] == "expert-000"
    assert facts["path"] == str(tmp_path / "a.safetensors")
    plain = shoal("--format", "safetensors", "--out", str(tmp_path / "b.safetensors")).stdout
    assert "served of round 2" in plain
    assert "differ from those of the model by at most 0.0e+00" in plain
    for words, sentence in (
        (("--format", "onyx"), "format 'onyx' is not known; did you mean onnx?"),
        (("--cluster", "9"), "cluster is '9'. It must be 0 to"),
        (("--out", str(tmp_path / "no" / "x.onnx")), "there is no folder"),
    ):
        result = shoal(*words)
        assert result.exit_code == 2
        assert sentence in " ".join(result.stderr.split())


def test_there_must_be_clusters_and_a_round(runs, tmp_path):
    with pytest.raises(UserError, match="method fedavg has no clusters"):
        export(runs("fedavg"), "safetensors", tmp_path / "x.safetensors", "0")
    with pytest.raises(UserError, match="is not a run directory"):
        export(tmp_path, "safetensors")


def run_export(run, tmp_path, *words):
    return CliRunner().invoke(
        app, ["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "x.safetensors"), *words]
    )


def test_the_central_accuracy_of_the_file_is_reported_if_it_was_evaluated(runs, tmp_path):
    run = runs("ifca")
    central = read_run(run).rounds[-1]["accuracy"]["central"]
    assert export(run, "safetensors", tmp_path / "x.safetensors").accuracy == central
    line = f"accuracy of the exported model on the central test set: {central:.1%}"
    assert run_export(run, tmp_path).stderr.strip() == line
    assert run_export(run, tmp_path, "--cluster", "0").stderr == ""  # the run did not evaluate that model alone
    facts = json.loads(run_export(run, tmp_path, "--json").stdout)
    assert facts["accuracy"] == central
    assert facts["notes"] == []


def test_the_export_of_an_unfinished_run_has_a_note(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("ifca"), run)
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints/round-000002")
    stderr = run_export(run, tmp_path).stderr
    assert "The run is unfinished. The model is of round 1 of 2." in stderr
    assert f"{read_run(run).rounds[0]['accuracy']['central']:.1%}" in stderr


def test_a_round_that_was_not_evaluated_has_no_accuracy(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("ifca", eval_every=2), run)
    shutil.rmtree(run / "checkpoints/round-000002")
    assert "accuracy" not in run_export(run, tmp_path).stderr


def test_missing_private_state_is_noted(runs, tmp_path):
    stderr = run_export(runs("ditto"), tmp_path).stderr
    assert "The file has no private state of the clients of method ditto." in stderr
    assert "private state" not in run_export(runs("ifca"), tmp_path).stderr
