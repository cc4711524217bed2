"""Exports a model of a run to a file for other programs.

The export checks that the file gives the same logits as the model of the run.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal import tree
from shoal.codec import unpack
from shoal.errors import UserError, look_up
from shoal.methods.composition.model_functions import received_model_predict
from shoal.rng import generator
from shoal.serve.blueprint import Blueprint
from shoal.serve.model_version import SERVING_MODEL, ModelVersion
from shoal.serve.reload import CheckpointWatcher
from shoal.store.checkpoint import Checkpoints
from shoal.store.outputs import OutputKind, check_output, write_output
from shoal.store.reader import RunRecord, read_run
from shoal.types import Params, ServerState

METADATA_FILE = "shoal.json"  # the extra file of a TorchScript archive
LOGIT_TOLERANCE = 1e-3  # a larger difference in logits means that the file is not the same model
LogitsFunction = Callable[[Tensor], Tensor]


class EncodedModel(NamedTuple):
    """The bytes of a file, and a function that computes logits with the file."""

    data: bytes
    predict_logits: LogitsFunction  # for raw samples
    has_dynamic_batch: bool = True  # False if the file takes one sample at a time


@dataclass(frozen=True)
class ExportFormat:
    """A file format: how a model is encoded, and how an existing export is recognised."""

    encode: Callable[[ModelVersion, str, FromRaw], EncodedModel]
    output_kind: OutputKind


@dataclass(frozen=True)
class ExportResult:
    """Facts about an exported file.

    Attributes
    ----------
    path : Path
        The file.
    model_name : str
        The name of the model in the run, or "served" for the serving model of unseen clients.
    round : int
        The model was saved after this training round.
    num_bytes : int
        The size of the file.
    max_logit_difference : float
        The largest difference in logits between the file and the model of the run.
    has_dynamic_batch : bool
        Whether the file takes any number of samples. False if it takes one sample at a time.
    accuracy : float or None
        The central accuracy of the exported model, if the run evaluated this model in this round.
    notes : tuple of str
        What the file does not have.
    """

    path: Path
    model_name: str
    round: int
    num_bytes: int
    max_logit_difference: float
    has_dynamic_batch: bool
    accuracy: float | None
    notes: tuple[str, ...]


class FromRaw(nn.Module):
    """Computes logits from raw samples: prepares them, and predicts with the serving models."""

    mean: Tensor
    std: Tensor

    def __init__(self, version: ModelVersion, models: Mapping[str, Params], uses_single_model: bool) -> None:
        super().__init__()
        self.uses_single_model = uses_single_model
        self._predict = received_model_predict(version.blueprint.model) if uses_single_model else version.method.predict
        self._names: dict[str, str] = {}
        for i, (path, value) in enumerate(tree.flatten(models).items()):
            self._names[path] = f"value_{i}"
            self.register_buffer(f"value_{i}", value)
        self._preparation = version.blueprint.inputs.preparation
        if self._preparation is not None:
            shape = (-1, *[1] * (len(version.blueprint.inputs.shape) - 1))
            kind = torch.float64 if self._preparation.double else torch.float32
            self.register_buffer("mean", torch.tensor(self._preparation.mean, dtype=kind).view(shape))
            self.register_buffer("std", torch.tensor(self._preparation.std, dtype=kind).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of raw samples."""
        if self._preparation is not None:
            x = ((x.to(self.mean.dtype) / self._preparation.scale - self.mean) / self.std).float()
        return self.logits(x)

    def logits(self, prepared: Tensor) -> Tensor:
        """Returns the logits of prepared samples."""
        models = tree.unflatten({path: getattr(self, name) for path, name in self._names.items()})
        return self._predict(models, {}, prepared)


def load_newest(run: Path) -> ModelVersion:
    """Returns the newest models of a run. Raises `UserError` if the run has no finished round."""
    blueprint, states = Blueprint.from_run(run), list[ServerState]()
    if not CheckpointWatcher(Checkpoints(run / "checkpoints")).load_newer(states.append):
        raise UserError(f"{run} has no finished round yet, so it has no model.")
    return ModelVersion(blueprint, states[0])


def export(
    run: Path, file_format: str, out_path: Path | None = None, cluster: str | None = None, force: bool = False
) -> ExportResult:
    """Write one model of a run to a file.

    Parameters
    ----------
    run : Path
        The run directory.
    file_format : str
        One of onnx, torchscript and safetensors.
    out_path : Path or None
        The file. None writes a file in the run directory.
    cluster : str or None
        The number or the name of a cluster, whose model is exported. None exports the serving model of unseen clients.
    force : bool
        Replace an existing file even if it is not an export.

    Returns
    -------
    ExportResult
        Facts about the file.

    Raises
    ------
    UserError
        If a parameter is wrong, if the run has no model yet, or if the file would not give the same logits.
    """
    export_format = look_up("format", file_format, FORMATS)
    output = export_format.output_kind
    version = load_newest(run)
    name = SERVING_MODEL if cluster is None else _resolve_cluster(version, cluster)
    path = out_path or run / f"{name}{output.ending}"
    check_output(path, output, force)
    if not path.parent.is_dir():
        raise UserError(f"out is {str(path)!r}, but there is no folder {str(path.parent)!r}.")
    module = FromRaw(version, version.models(name), uses_single_model=cluster is not None).eval()
    data, predict_logits, is_dynamic = export_format.encode(version, name, module)
    batch_sizes = (1, 5) if is_dynamic else (1,)
    difference = max(_max_difference(version, module, predict_logits, n) for n in batch_sizes)
    if difference > LOGIT_TOLERANCE:
        raise UserError(
            f"format is {file_format!r}, but its logits would differ by {difference:.2g} from those of the model. They "
            f"may differ by at most {LOGIT_TOLERANCE:g}."
        )
    write_output(path, data, output, force)
    record, is_serving_model = read_run(run), name == SERVING_MODEL
    central = _central_accuracy(record, version.round) if is_serving_model else None
    notes = tuple(_notes(version, record, is_serving_model))
    return ExportResult(path, name, version.round, len(data), difference, is_dynamic, central, notes)


def _central_accuracy(record: RunRecord, round_index: int) -> float | None:
    """Returns the central accuracy of exactly this round, which evaluated the serving models, or None."""
    accuracies = [line["accuracy"]["central"] for line in record.evaluated_rounds if line["round"] == round_index]
    return accuracies[0] if accuracies else None


def _notes(version: ModelVersion, record: RunRecord, is_serving_model: bool) -> Iterator[str]:
    progress = f"round {version.round} of {record.config['rounds']}"
    if record.result is None:
        yield f"The run is unfinished. The model is of {progress}."
    elif record.result.get("stop_reason"):
        yield f"The run ended early, at {progress}: {record.result['stop_reason']}."
    if version.needs_private_state:
        content = "the serving model of unseen clients" if is_serving_model else "the expert of the cluster alone"
        yield f"The file has no private state of the clients of method {version.method.name}. It has {content}."


def _resolve_cluster(version: ModelVersion, cluster: str) -> str:
    names = sorted(version.state.models)
    if not version.state.membership:
        raise UserError(f"cluster is {cluster!r}, but method {version.method.name} has no clusters. Leave it out.")
    if cluster in names:
        return cluster
    if not cluster.isdigit() or int(cluster) >= len(names):
        raise UserError(f"cluster is {cluster!r}. It must be 0 to {len(names) - 1}, or one of {', '.join(names)}.")
    return names[int(cluster)]


def _random_inputs(version: ModelVersion, num_samples: int) -> Tensor:
    """Returns random raw samples with the means and the deviations of the training data."""
    inputs = version.blueprint.inputs
    x = torch.randn(num_samples, *inputs.shape, generator=generator(num_samples))
    if inputs.preparation is None:
        return x
    shape = (-1, *[1] * (len(inputs.shape) - 1))
    mean, std = (torch.tensor(m).view(shape) for m in (inputs.preparation.mean, inputs.preparation.std))
    return (x * std + mean) * inputs.preparation.scale


def _max_difference(version: ModelVersion, module: FromRaw, predict_logits: LogitsFunction, num_samples: int) -> float:
    """Returns the largest difference in logits between the file and the model of the run, for random samples.

    The samples of the model are prepared as for training, and the model predicts as in the service.
    """
    raw = _random_inputs(version, num_samples)
    with torch.no_grad():
        expected = module.logits(version.blueprint.inputs.to_tensor(raw.numpy()))
        return float((predict_logits(raw) - expected).abs().max())


def _safetensors(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    data, _ = version.packed_file(name)
    unpacked = FromRaw(version, unpack(data)[0], uses_single_model=module.uses_single_model)
    return EncodedModel(data, unpacked)


def _trace(version: ModelVersion, module: FromRaw) -> tuple[torch.export.ExportedProgram, bool]:
    """Returns a graph of tensor operations, and whether it takes any number of samples.

    A method whose code depends on the number of samples has a graph for one sample at a time.
    """
    rows = torch.export.Dim("rows", min=1)
    try:
        return torch.export.export(module, (_random_inputs(version, 3),), dynamic_shapes=({0: rows},)), True
    except Exception as error:  # the exception has no common type
        try:
            return torch.export.export(module, (_random_inputs(version, 1),)), False
        except Exception:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"method is {version.method.name}, which cannot be exported as a graph: {reason}"
            ) from error


def _torchscript(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is no longer developed; docs/serve.md says so
        program, is_dynamic = _trace(version, module)  # the module itself cannot be traced: it uses functional calls
        example = _random_inputs(version, 3 if is_dynamic else 1)
        traced = torch.jit.trace(program.module(), example, check_trace=False)  # type: ignore[no-untyped-call]
        stream = io.BytesIO()
        torch.jit.save(traced, stream, _extra_files={METADATA_FILE: json.dumps(_facts(version))})
        loaded = torch.jit.load(io.BytesIO(stream.getvalue()))  # type: ignore[no-untyped-call]
    return EncodedModel(stream.getvalue(), loaded, is_dynamic)


def _onnx_libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"format is 'onnx', which needs the extra named onnx: pip install -c constraints.txt -e '.[onnx]' ({error})"
        ) from None
    return onnx, onnxruntime


def _onnx(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    _, onnxruntime = _onnx_libraries()
    with torch.no_grad(), warnings.catch_warnings(), _MutedLogging():
        warnings.simplefilter("ignore")
        graph, is_dynamic = _trace(version, module)
        program = torch.onnx.export(graph, input_names=["rows"], output_names=["logits"], dynamo=True, verbose=False)
    assert program is not None
    proto = program.model_proto
    for key, value in _facts(version).items():
        proto.metadata_props.add(key=f"shoal.{key}", value=json.dumps(value))
    data: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return EncodedModel(data, lambda x: torch.from_numpy(session.run(None, {"rows": x.numpy()})[0]), is_dynamic)


def _facts(version: ModelVersion) -> dict[str, Any]:
    """Returns the metadata of a file that includes the preparation of samples."""
    inputs = version.blueprint.inputs
    return {"classes": inputs.classes, "round": version.round} | ({"columns": inputs.columns} if inputs.columns else {})


def _is_own_onnx(path: Path) -> bool:
    onnx, _ = _onnx_libraries()
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except Exception:  # protobuf has its own exceptions for a file that is not an ONNX model
        return False
    return any(entry.key == "shoal.round" for entry in model.metadata_props)


def _is_own_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"/extra/{METADATA_FILE}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _is_own_safetensors(path: Path) -> bool:
    """Returns whether the file is an export, which has a job and inputs, unlike checkpoints and messages."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("shoal", "null"))
    except (SafetensorError, ValueError):
        return False
    return isinstance(facts, dict) and {"job", "inputs", "round"} <= facts.keys()


class _MutedLogging:
    """Disables logging up to warnings, because the exporter logs every step."""

    def __enter__(self) -> None:
        self.before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *error: object) -> None:
        logging.disable(self.before)


def _output_kind(file_format: str, ending: str, is_own: Callable[[Path], bool]) -> OutputKind:
    return OutputKind(f"a model in the format {file_format}", ending, is_own)


FORMATS = {
    "onnx": ExportFormat(_onnx, _output_kind("onnx", ".onnx", _is_own_onnx)),
    "torchscript": ExportFormat(_torchscript, _output_kind("torchscript", ".pt", _is_own_torchscript)),
    "safetensors": ExportFormat(_safetensors, _output_kind("safetensors", ".safetensors", _is_own_safetensors)),
}
