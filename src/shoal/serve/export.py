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
from shoal.serve.model_version import SERVED, Version
from shoal.serve.reload import Watch
from shoal.store.checkpoint import Checkpoints
from shoal.store.outputs import OutputKind, check_output, write_output
from shoal.store.reader import RunRecord, read_run
from shoal.types import Params, ServerState

METADATA = "shoal.json"  # the extra file of a TorchScript archive
TOLERANCE = 1e-3  # of logits: beyond it, the file is not the model
Answer = Callable[[Tensor], Tensor]


class Written(NamedTuple):
    data: bytes
    answer: Answer  # by the file, for raw rows
    any_rows: bool = True


@dataclass(frozen=True)
class Format:
    write: Callable[[Version, str, FromRaw], Written]
    output: OutputKind


@dataclass(frozen=True)
class Exported:
    path: Path
    name: str  # of the model
    round: int
    bytes: int
    difference: float  # the largest, of logits, between the file and the run's own model
    any_rows: bool  # or one at a time
    accuracy: float | None  # on the central test set, of what is in the file, where the run evaluated just that
    notes: tuple[str, ...]  # what the file is not


class FromRaw(nn.Module):
    """Raw rows to logits: the preparation, then the models as they are served."""

    mean: Tensor
    std: Tensor

    def __init__(self, version: Version, models: Mapping[str, Params], single: bool) -> None:
        super().__init__()
        self.single = single
        self._predict = received_model_predict(version.blueprint.model) if single else version.method.predict
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


def newest(run: Path) -> Version:
    blueprint, found = Blueprint.of_run(run), list[ServerState]()
    if not Watch(Checkpoints(run / "checkpoints")).newer(found.append):
        raise UserError(f"{run} has no finished round yet, so there is no model in it")
    return Version(blueprint, found[0])


def export(
    run: Path, format: str, out: Path | None = None, cluster: str | None = None, force: bool = False
) -> Exported:
    """Writes one model of a run to a file. A file that is there must be an export, unless `force` says otherwise."""
    write, output = (chosen := look_up("format", format, FORMATS)).write, chosen.output
    version = newest(run)
    name = SERVED if cluster is None else _cluster(version, cluster)
    place = out or run / f"{name}{output.ending}"
    check_output(place, output, force)
    if not place.parent.is_dir():
        raise UserError(f"out is {str(place)!r}, but there is no folder {str(place.parent)!r}")
    module = FromRaw(version, version.models(name), single=cluster is not None).eval()
    data, answer, any_rows = write(version, name, module)
    difference = max(_difference(version, module, answer, rows) for rows in ((1, 5) if any_rows else (1,)))
    if difference > TOLERANCE:
        raise UserError(f"format {format!r} gives answers that differ by {difference:.2g} from the model's own")
    write_output(place, data, output, force)
    record, served = read_run(run), name == SERVED
    central = _central(record, version.round) if served else None
    notes = tuple(_notes(version, record, served))
    return Exported(place, name, version.round, len(data), difference, any_rows, central, notes)


def _central(record: RunRecord, round: int) -> float | None:
    """Only of that very round: it was evaluated with just the models that are served."""
    found = [line["accuracy"]["central"] for line in record.evaluated_rounds if line["round"] == round]
    return found[0] if found else None


def _notes(version: Version, record: RunRecord, served: bool) -> Iterator[str]:
    done = f"round {version.round} of {record.config['rounds']}"
    if record.result is None:
        yield f"the run is unfinished: this is {done}"
    elif record.result.get("stopped"):
        yield f"the run ended early, at {done}: {record.result['stopped']}"
    if version.needs_private:
        answers = "it answers as for a client that never trained" if served else "it is the cluster's model alone"
        yield f"what clients of method {version.method.name} keep to themselves is not in the file: {answers}"


def _cluster(version: Version, cluster: str) -> str:
    names = sorted(version.state.models)
    if not version.state.membership:
        raise UserError(f"cluster is {cluster!r}, but method {version.method.name} has no clusters; leave it out")
    if cluster in names:
        return cluster
    if not cluster.isdigit() or int(cluster) >= len(names):
        raise UserError(f"cluster is {cluster!r}; it must be 0 to {len(names) - 1}, or one of {', '.join(names)}")
    return names[int(cluster)]


def _raw_rows(version: Version, rows: int) -> Tensor:
    """Such as training had: around the means, as far apart as the deviations say."""
    inputs = version.blueprint.inputs
    x = torch.randn(rows, *inputs.shape, generator=generator(rows))
    if inputs.preparation is None:
        return x
    shape = (-1, *[1] * (len(inputs.shape) - 1))
    mean, std = (torch.tensor(m).view(shape) for m in (inputs.preparation.mean, inputs.preparation.std))
    return (x * std + mean) * inputs.preparation.scale


def _difference(version: Version, module: FromRaw, answer: Answer, rows: int) -> float:
    """Against the run's own way: rows prepared as for training, then what the service would use."""
    raw = _raw_rows(version, rows)
    with torch.no_grad():
        own = module.logits(version.blueprint.inputs.tensor(raw.numpy()))
        return float((answer(raw) - own).abs().max())


def _safetensors(version: Version, name: str, module: FromRaw) -> Written:
    data, _ = version.file(name)
    again = FromRaw(version, unpack(data)[0], single=module.single)
    return Written(data, again)


def _program(version: Version, module: FromRaw) -> tuple[torch.export.ExportedProgram, bool]:
    """As a graph of tensor operations, and whether it takes any number of rows. A method that asks how many there are,
    to choose the faster way, has a graph for one row at a time."""
    rows = torch.export.Dim("rows", min=1)
    try:
        return torch.export.export(module, (_raw_rows(version, 3),), dynamic_shapes=({0: rows},)), True
    except Exception as error:  # of several kinds, by what could not be traced
        try:
            return torch.export.export(module, (_raw_rows(version, 1),)), False
        except Exception:
            reason = str(error).splitlines()[0]
            raise UserError(f"method {version.method.name} cannot be written as a graph: {reason}") from error


def _torchscript(version: Version, name: str, module: FromRaw) -> Written:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is no longer developed; the page says so
        program, any_rows = _program(version, module)  # not the module itself: it calls a network as a function
        rows = _raw_rows(version, 3 if any_rows else 1)
        traced = torch.jit.trace(program.module(), rows, check_trace=False)  # type: ignore[no-untyped-call]
        stream = io.BytesIO()
        torch.jit.save(traced, stream, _extra_files={METADATA: json.dumps(_facts(version))})
        again = torch.jit.load(io.BytesIO(stream.getvalue()))  # type: ignore[no-untyped-call]
    return Written(stream.getvalue(), again, any_rows)


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


def _onnx(version: Version, name: str, module: FromRaw) -> Written:
    _, onnxruntime = _onnx_libraries()
    with torch.no_grad(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        graph, any_rows = _program(version, module)
        program = torch.onnx.export(graph, input_names=["rows"], output_names=["logits"], dynamo=True, verbose=False)
    assert program is not None
    proto = program.model_proto
    for key, value in _facts(version).items():
        proto.metadata_props.add(key=f"shoal.{key}", value=json.dumps(value))
    data: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return Written(data, lambda x: torch.from_numpy(session.run(None, {"rows": x.numpy()})[0]), any_rows)


def _facts(version: Version) -> dict[str, Any]:
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
            return any(name.endswith(f"/extra/{METADATA}") for name in archive.namelist())
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


class _quiet:
    """The exporter tells every step to the log, whoever listens."""

    def __enter__(self) -> None:
        self.before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *error: object) -> None:
        logging.disable(self.before)


def _output(format: str, ending: str, is_own: Callable[[Path], bool]) -> OutputKind:
    return OutputKind(f"a model in the format {format}", ending, is_own)


FORMATS = {
    "onnx": Format(_onnx, _output("onnx", ".onnx", _is_own_onnx)),
    "torchscript": Format(_torchscript, _output("torchscript", ".pt", _is_own_torchscript)),
    "safetensors": Format(_safetensors, _output("safetensors", ".safetensors", _is_own_safetensors)),
}
