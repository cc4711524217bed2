"""A job: everything that says what a run does. Flags and recipe files both become one of these."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
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
    from shoal.methods.composition.compose import parse, written

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
    workers: Positive | None = None  # processes of the pool; None: as many as cores, of whichever machine goes on
    pieces: Positive | None = None  # into which a round's work is cut; None: for a pool, as many as cores at the start
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
