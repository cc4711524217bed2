"""A job: everything that says what a run does. Flags and recipe files both become one of these."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shoal.errors import UserError, did_you_mean

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Joules = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _edges(value: Any) -> Any:
    """A number is one too; "none" is for grids, which cannot leave a key out."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None if value == "none" else value


def _method(value: Any) -> Any:
    """A table of steps and their pieces is a method too; the same pieces are always written in the same way."""
    if not isinstance(value, Mapping) and not (isinstance(value, str) and "=" in value):
        return value
    from shoal.methods.composed import parse, written

    return written(value if isinstance(value, Mapping) else parse(value))


class Job(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[str, BeforeValidator(_method)] = "fedavg"  # a name, or pieces: cluster=aidc,train=proximal
    data: str = "digits"
    partition: str = "dirichlet:0.3"
    clients: Positive | None = None  # None: 20, or all owners of a natural partition
    rounds: Positive = 20
    cohort: int | float = 0.25  # clients per round: a whole number, or a share such as 0.1
    epochs: Positive = 2
    batch_size: Positive = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    model: str = "mlp"
    seed: int = 0
    variant: str | None = None  # what it is called in tables, where the method's name does not say enough
    fleet: Literal["auto", "plain", "vector", "pool", "flower"] = "auto"
    workers: Positive | None = None  # processes of the pool; None: as many as cores
    eval_every: Positive = 1
    device: str = "cpu"
    rows: Positive | None = None  # a subsample of the training data
    min_size: Positive = 10
    val_share: Share = 0.1
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    label_column: str = "label"
    client_column: str | None = None
    sensitive: Share | None = None  # of a client's rows: of high sensitivity; None: 0.3, or as the column says
    sensitive_column: str | None = None  # or a column that says of each row whether it is
    drop_columns: tuple[str, ...] = ()
    public: Annotated[int, Field(ge=0)] | None = None  # rows that no client holds; None: as many as the method wants
    edges: Annotated[str | None, BeforeValidator(_edges)] = None  # between clients and the cloud: 5, alike:5, mixed:5
    edge_column: str | None = None  # or a column that names the edge of a row's client
    cloud_every: Positive | None = None  # rounds between two meetings of the edges in the cloud; None: 5
    long_link: str | None = None  # of edges to the cloud; None: ethernet
    unseen: int | float | None = None  # clients that never train, a number or a share; None: nobody
    keep: Positive = 3  # checkpoints
    devices: str = "pi"  # what clients are: a profile, or a mix such as pi:0.5,phone:0.5
    link: str = "wifi"
    radio_w: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # None: as the link says
    count_idle: bool = False
    battery: Joules | None = None  # of each client
    budget_joules: Joules | None = None  # of all clients together
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # of a stage, on the simulated clock
    measure: Literal["none", "codecarbon"] = "none"
    country: str | None = None  # three letters, for the CO2 of a measured kilowatt hour
    set: dict[str, dict[str, Any]] = Field(default_factory=dict)  # options of the method's pieces

    @property
    def natural(self) -> bool:
        return self.partition.split("+")[0].split(":")[0] == "natural"

    def training(self, clients: int) -> int:
        """How many of so many clients are left to train."""
        if not self.unseen:
            return clients
        from shoal.data.unseen import held_out

        return clients - held_out(clients, self.unseen)

    def cohort_size(self, clients: int) -> int:
        size = self.cohort
        if isinstance(size, float):
            if not 0 < size <= 1:
                raise UserError(f"cohort is {size}; a share must be above 0 and at most 1.0")
            return max(1, round(size * clients))
        if not 1 <= size <= clients:
            raise UserError(f"cohort is {size}; it must be between 1 and the number of clients, {clients}")
        return size


def make_job(values: Mapping[str, Any]) -> Job:
    """A column that says whose row it is asks for the natural partition."""
    if values.get("client_column") is not None and "partition" not in values:
        values = {**values, "partition": "natural"}
    try:
        job = Job(**values)
    except ValidationError as error:
        raise UserError(_sentence(error.errors()[0])) from None
    if job.sensitive is not None and job.sensitive_column is not None:
        raise UserError(
            f"sensitive is {job.sensitive} and sensitive_column {job.sensitive_column!r}; it must be one of them: "
            "a share of every client's rows, or the column that says which"
        )
    if job.edge_column is not None and not job.natural:
        raise UserError(
            f"edge_column is {job.edge_column!r}, but partition {job.partition!r} makes clients of its own: leave that "
            "out, and name the clients with --client-column"
        )
    if job.edges is not None and job.edge_column is not None:
        raise UserError(
            f"edges is {job.edges!r} and edge_column {job.edge_column!r}; it must be one of them: how many there "
            "are, or the column that says which client is where"
        )
    if job.client_column is not None and not job.natural:
        raise UserError(
            f"client_column is {job.client_column!r}, but partition {job.partition!r} deals rows anew: "
            "use --partition natural, or leave the column out with --drop-column"
        )
    return job


def _sentence(problem: Mapping[str, Any]) -> str:
    field = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(field, Job.model_fields) or f" (known: {', '.join(Job.model_fields)})"
        return f"key {field!r} is not known{hint}"
    if isinstance(told := problem.get("ctx", {}).get("error"), UserError):
        return str(told)
    message = str(problem["msg"])
    return f"{field} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def parse_options(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """["train.mu=0.1"] -> {"train": {"mu": 0.1}}"""
    options: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        piece, dot, key = path.partition(".")
        if not (equals and dot and piece and key and text):
            raise UserError(f"--set {pair!r} is not of the form piece.key=value, such as train.mu=0.1")
        options.setdefault(piece.strip(), {})[key.strip()] = _literal(text.strip())
    return options


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parse_amount(flag: str, text: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{flag} {text!r} is neither a number of clients (10) nor a share (0.1)") from None
    if not math.isfinite(value):
        raise UserError(f"{flag} {text!r} is not a number of clients")
    return int(text) if text.strip().lstrip("+-").isdigit() else value


class Recipe(BaseModel):
    """A file that reproduces one table: a job, under [grid] the keys that vary, under [only.METHOD] those of one
    method, under [variants.NAME] those of a row that has a name of its own, and under [paper] the figures it is to be
    read beside."""

    model_config = ConfigDict(frozen=True)

    title: str
    jobs: dict[str, Job]  # label -> job; one job without a label where nothing varies
    paper: dict[str, Any] | None = None

    @property
    def single(self) -> Job | None:
        return self.jobs.get("")


def read_toml(path: Path, kind: str = "recipe") -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{kind} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} {path} is not valid TOML: {error}") from None


def layered(*layers: Mapping[str, Any]) -> Job:
    """Of tables of keys: what a later one says wins, option by option."""
    flat: dict[str, Any] = {}
    for layer in layers:
        flat |= _paths(layer)
    return make_job(_nested(flat))


def load_recipe(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    content = read_toml(path)
    title, paper = str(content.pop("title", path.stem)), content.pop("paper", None)
    only = _only(path, content.pop("only", {}))
    variants = _variants(path, content.pop("variants", {}))
    grid, flags = _grid(path, content.pop("grid", {})), _paths(overrides)
    grid |= {"variant": list(variants)} if variants and "variant" not in grid else {}
    if "method" in content and "method" in grid:
        raise UserError(f"recipe {path}: method is given and in the grid; it must be one of them")
    written = _paths(content) | grid
    grid = {k: v for k, v in grid.items() if k not in flags}  # a flag pins what the grid would vary
    jobs: dict[str, Job] = {}
    for label, point in _points(grid):
        if label in jobs:
            raise UserError(
                f"recipe {path}: two points of the grid are called {label!r}; each value must be there once"
            )
        named = _variant(path, variants, point.get("variant"))
        values = _paths(content) | named | flags | point
        jobs[label] = make_job(_nested(only.get(str(values.get("method")), {}) | values))
    return Recipe(title=title + _changed(flags, written, only | variants), jobs=jobs, paper=paper)


def _changed(flags: Mapping[str, Any], written: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A title speaks of what is written: where flags say otherwise, it says so."""
    said = [written, *tables.values()]
    keys = [key for key, value in flags.items() if any(key in values and values[key] != value for values in said)]
    return f" (changed: {', '.join(key.removeprefix('set.') for key in keys)})" if keys else ""


def _grid(path: Path, grid: Any) -> dict[str, list[Any]]:
    if not isinstance(grid, dict):
        raise UserError(f"recipe {path}: grid is {grid!r}; it must be a table of lists, such as seed = [0, 1]")
    flat = _paths(grid)
    for key, values in flat.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"recipe {path}: grid.{key} is {values!r}; it must be a list of values")
    return flat


def _only(path: Path, tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"recipe {path}: [only] is {tables!r}; it must be tables by method, such as [only.simclust]")
    return {method: _paths(values) for method, values in tables.items()}


def _variants(path: Path, tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"recipe {path}: [variants] is {tables!r}; it must be tables by name, such as [variants.slow]")
    return {name: _paths(values) for name, values in tables.items()}


def _variant(path: Path, variants: Mapping[str, dict[str, Any]], name: str | None) -> dict[str, Any]:
    if name is not None and name not in variants:
        hint = did_you_mean(str(name), variants) or f" (known: {', '.join(variants)})"
        raise UserError(f"recipe {path}: grid.variant has {name!r}, for which there is no [variants] table{hint}")
    return variants[name] if name is not None else {}


def _paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"set": {"train": {"mu": 1}}} -> {"set.train.mu": 1}; other keys as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key.split(".")[0] == "set" and isinstance(value, Mapping):
            flat |= _paths({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in flat.items() if not k.startswith("set.")}
    options: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        if path.startswith("set."):
            _, piece, *key = path.split(".")
            if len(key) != 1:
                raise UserError(f"key {path!r} is {value!r}; options are given as set.piece.key, such as set.train.mu")
            options.setdefault(piece, {})[key[0]] = value
    return values if "set" in values else values | {"set": options}


def _points(grid: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination. A value that is a table, such as {merge = 0.2, split = 0.3} of set.cluster, sets its keys
    together; so does one of `set`, such as {cluster = {by = "kmeans"}}."""
    for values in itertools.product(*grid.values()):
        point: dict[str, Any] = {}
        for key, value in zip(grid, values, strict=True):
            point |= _paths({key: value})
        yield "-".join(map(_part, values)), point


def _part(value: Any) -> str:
    """Of a run's name."""
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_part(v)}" for k, v in value.items())
    return str(value).replace("/", "_").replace(":", "")
