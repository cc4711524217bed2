"""A run's model as a file for other programs, checked: the file must answer what the run's own model answers."""

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
LOGIT_TOLERANCE = 1e-3  # of logits: beyond it, the file is not the model
LogitsFunction = Callable[[Tensor], Tensor]


class EncodedModel(NamedTuple):
    data: bytes
    predict_logits: LogitsFunction  # by the file, for raw rows
    has_dynamic_batch: bool = True


@dataclass(frozen=True)
class ExportFormat:
    encode: Callable[[ModelVersion, str, FromRaw], EncodedModel]
    output_kind: OutputKind


@dataclass(frozen=True)
class ExportResult:
    path: Path
    model_name: str  # of the model
    round: int
    num_bytes: int
    max_logit_difference: float  # the largest, of logits, between the file and the run's own model
    has_dynamic_batch: bool  # or one at a time
    accuracy: float | None  # on the central test set, of what is in the file, where the run evaluated just that
    notes: tuple[str, ...]  # what the file is not


class FromRaw(nn.Module):
    """Raw rows to logits: the preparation, then the models as they are served."""

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
        if self._preparation is not None:
            x = ((x.to(self.mean.dtype) / self._preparation.scale - self.mean) / self.std).float()
        return self.logits(x)

    def logits(self, prepared: Tensor) -> Tensor:
        models = tree.unflatten({path: getattr(self, name) for path, name in self._names.items()})
        return self._predict(models, {}, prepared)


def load_newest(run: Path) -> ModelVersion:
    blueprint, found = Blueprint.from_run(run), list[ServerState]()
    if not CheckpointWatcher(Checkpoints(run / "checkpoints")).load_newer(found.append):
        raise UserError(f"{run} has no finished round yet, so there is no model in it")
    return ModelVersion(blueprint, found[0])


def export(
    run: Path, file_format: str, out_path: Path | None = None, cluster: str | None = None, force: bool = False
) -> ExportResult:
    """Writes one model of a run to a file. A file that is there must be an export, unless `force` says otherwise."""
    write, output = (chosen := look_up("format", file_format, FORMATS)).encode, chosen.output_kind
    version = load_newest(run)
    name = SERVING_MODEL if cluster is None else _resolve_cluster(version, cluster)
    path = out_path or run / f"{name}{output.ending}"
    check_output(path, output, force)
    if not path.parent.is_dir():
        raise UserError(f"out is {str(path)!r}, but there is no folder {str(path.parent)!r}")
    module = FromRaw(version, version.models(name), uses_single_model=cluster is not None).eval()
    data, answer, any_rows = write(version, name, module)
    difference = max(_max_difference(version, module, answer, rows) for rows in ((1, 5) if any_rows else (1,)))
    if difference > LOGIT_TOLERANCE:
        raise UserError(f"format {file_format!r} gives answers that differ by {difference:.2g} from the model's own")
    write_output(path, data, output, force)
    record, served = read_run(run), name == SERVING_MODEL
    central = _central_accuracy(record, version.round) if served else None
    notes = tuple(_notes(version, record, served))
    return ExportResult(path, name, version.round, len(data), difference, any_rows, central, notes)


def _central_accuracy(record: RunRecord, round_index: int) -> float | None:
    """Only of that very round: it was evaluated with just the models that are served."""
    found = [line["accuracy"]["central"] for line in record.evaluated_rounds if line["round"] == round_index]
    return found[0] if found else None


def _notes(version: ModelVersion, record: RunRecord, is_serving_model: bool) -> Iterator[str]:
    done = f"round {version.round} of {record.config['rounds']}"
    if record.result is None:
        yield f"the run is unfinished: this is {done}"
    elif record.result.get("stopped"):
        yield f"the run ended early, at {done}: {record.result['stopped']}"
    if version.needs_private_state:
        answers = (
            "it answers as for a client that never trained" if is_serving_model else "it is the cluster's model alone"
        )
        yield f"what clients of method {version.method.name} keep to themselves is not in the file: {answers}"


def _resolve_cluster(version: ModelVersion, cluster: str) -> str:
    names = sorted(version.state.models)
    if not version.state.membership:
        raise UserError(f"cluster is {cluster!r}, but method {version.method.name} has no clusters; leave it out")
    if cluster in names:
        return cluster
    if not cluster.isdigit() or int(cluster) >= len(names):
        raise UserError(f"cluster is {cluster!r}; it must be 0 to {len(names) - 1}, or one of {', '.join(names)}")
    return names[int(cluster)]


def _random_inputs(version: ModelVersion, num_samples: int) -> Tensor:
    """Such as training had: around the means, as far apart as the deviations say."""
    inputs = version.blueprint.inputs
    x = torch.randn(num_samples, *inputs.shape, generator=generator(num_samples))
    if inputs.preparation is None:
        return x
    shape = (-1, *[1] * (len(inputs.shape) - 1))
    mean, std = (torch.tensor(m).view(shape) for m in (inputs.preparation.mean, inputs.preparation.std))
    return (x * std + mean) * inputs.preparation.scale


def _max_difference(version: ModelVersion, module: FromRaw, predict_logits: LogitsFunction, num_samples: int) -> float:
    """Against the run's own way: rows prepared as for training, then what the service would use."""
    raw = _random_inputs(version, num_samples)
    with torch.no_grad():
        own = module.logits(version.blueprint.inputs.to_tensor(raw.numpy()))
        return float((predict_logits(raw) - own).abs().max())


def _safetensors(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    data, _ = version.packed_file(name)
    again = FromRaw(version, unpack(data)[0], uses_single_model=module.uses_single_model)
    return EncodedModel(data, again)


def _trace(version: ModelVersion, module: FromRaw) -> tuple[torch.export.ExportedProgram, bool]:
    """As a graph of tensor operations, and whether it takes any number of rows. A method that asks how many there are,
    to choose the faster way, has a graph for one row at a time."""
    rows = torch.export.Dim("rows", min=1)
    try:
        return torch.export.export(module, (_random_inputs(version, 3),), dynamic_shapes=({0: rows},)), True
    except Exception as error:  # of several kinds, by what could not be traced
        try:
            return torch.export.export(module, (_random_inputs(version, 1),)), False
        except Exception:
            reason = str(error).splitlines()[0]
            raise UserError(f"method {version.method.name} cannot be written as a graph: {reason}") from error


def _torchscript(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is no longer developed; the page says so
        program, any_rows = _trace(version, module)  # not the module itself: it calls a network as a function
        rows = _random_inputs(version, 3 if any_rows else 1)
        traced = torch.jit.trace(program.module(), rows, check_trace=False)  # type: ignore[no-untyped-call]
        stream = io.BytesIO()
        torch.jit.save(traced, stream, _extra_files={METADATA_FILE: json.dumps(_facts(version))})
        again = torch.jit.load(io.BytesIO(stream.getvalue()))  # type: ignore[no-untyped-call]
    return EncodedModel(stream.getvalue(), again, any_rows)


def _onnx_libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"format 'onnx' needs the extra of that name: pip install -c constraints.txt -e '.[onnx]' ({error})"
        ) from None
    return onnx, onnxruntime


def _onnx(version: ModelVersion, name: str, module: FromRaw) -> EncodedModel:
    _, onnxruntime = _onnx_libraries()
    with torch.no_grad(), warnings.catch_warnings(), _MutedLogging():
        warnings.simplefilter("ignore")
        graph, any_rows = _trace(version, module)
        program = torch.onnx.export(graph, input_names=["rows"], output_names=["logits"], dynamo=True, verbose=False)
    assert program is not None
    proto = program.model_proto
    for key, value in _facts(version).items():
        proto.metadata_props.add(key=f"shoal.{key}", value=json.dumps(value))
    data: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return EncodedModel(data, lambda x: torch.from_numpy(session.run(None, {"rows": x.numpy()})[0]), any_rows)


def _facts(version: ModelVersion) -> dict[str, Any]:
    """The metadata of a file that has the preparation in it."""
    inputs = version.blueprint.inputs
    return {"classes": inputs.classes, "round": version.round} | ({"columns": inputs.columns} if inputs.columns else {})


def _is_own_onnx(path: Path) -> bool:
    onnx, _ = _onnx_libraries()
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except Exception:  # of protobuf's own kind: what is no model of this format
        return False
    return any(entry.key == "shoal.round" for entry in model.metadata_props)


def _is_own_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"/extra/{METADATA_FILE}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _is_own_safetensors(path: Path) -> bool:
    """Whether it is an export: checkpoints and messages are safetensors of shoal too, but say no method and inputs."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("shoal", "null"))
    except (SafetensorError, ValueError):
        return False
    return isinstance(facts, dict) and {"job", "inputs", "round"} <= facts.keys()


class _MutedLogging:
    """The exporter tells every step to the log, whoever listens."""

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
