"""A job: all settings of a run. The flags of a command and the keys of a recipe both become a `Job`.

Each setting is declared once, here. `make docs` writes docs/settings.md and experiment/settings.py from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from shoal.errors import UserError, did_you_mean, parse_toml
from shoal.experiment.declaration import declarations, setting


def _normalise_edges(value: Any) -> Any:
    """Returns the text for a number of edge servers. The text "none" is for grids, which cannot leave a key out."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None if value == "none" else value


def _normalise_method(value: Any) -> Any:
    """Returns the name of a method. A table of steps and pieces becomes a text that is the same for the same pieces."""
    if not isinstance(value, Mapping) and not (isinstance(value, str) and "=" in value):
        return value
    from shoal.methods.composition.compose import canonical_name, parse_composition

    return canonical_name(value if isinstance(value, Mapping) else parse_composition(value))


class Job(BaseModel):
    """All settings of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: Annotated[str, BeforeValidator(_normalise_method)] = setting(
        "fedavg",
        "Train with this method: a name from `shoal methods`, or pieces such as cluster=aidc,train=proximal.",
        panel="Model and method",
        flag=None,
    )
    data: str = setting(
        "digits",
        "Use this data set: a name from `shoal data list`, or the path of your own .npz, .parquet or .csv file or "
        "folder of images.",
        panel="Data",
        scope="data",
    )
    partition: str = setting(
        "dirichlet:0.3",
        "Divide the training samples among the clients by this rule: iid, dirichlet:ALPHA, equal:ALPHA, "
        "groups:RHO,ALPHA, labels:0-2/3-9, shards:K, quantity:ALPHA or natural, which keeps the clients that the data "
        "name. Data transformations may follow, each after a plus sign: rotate:0,90, invert:FRACTION, noise:SIGMA, "
        "mislabel:FRACTION or permute:FRACTION.",
        panel="Clients",
        scope="partition",
    )
    clients: int | None = setting(
        None,
        "Divide the samples among this many clients. With a natural partition, keep this many of the clients that the "
        "data name.",
        panel="Clients",
        scope="partition",
        unset_meaning="20, or all clients of a natural partition",
        ge=1,
    )
    rounds: int = setting(20, "Train for this many global rounds.", panel="Training", ge=1)
    cohort: int | float = setting(
        0.25,
        "Select this many clients in each round. A whole number counts clients, so 1 is one client. A decimal number "
        "up to 1.0 is a fraction of the clients that train, so 1.0 is all of them.",
        panel="Training",
    )
    epochs: int = setting(
        2, "Let each selected client train for this many local epochs per round.", panel="Training", ge=1
    )
    batch_size: int = setting(32, "Use this many samples in each step of local training.", panel="Training", ge=1)
    lr: float = setting(0.1, "Use this learning rate in the clients' local SGD.", panel="Training", gt=0)
    momentum: float = setting(
        0.0, "Use this momentum in the clients' local SGD. The value 0 is plain SGD.", panel="Training", ge=0, lt=1
    )
    model: str = setting(
        "mlp",
        "Train this network: mlp, mlp-dropout, linear, cnn-cifar, cnn-fedavg, cnn-1d, resnet18, resnet18-batchnorm, or "
        "your own as package.module:Class.",
        panel="Model and method",
    )
    seed: int = setting(0, "Derive every random choice of the data and of the run from this number.", panel="Training")
    variant: str | None = setting(
        None,
        "Show the run under this name in tables and reports.",
        panel="Model and method",
        flag=None,
        unset_meaning="the method's name",
    )
    fleet: Literal["auto", "plain", "vector", "pool", "flower"] = setting(
        "auto",
        "Choose how the clients are executed: plain runs one after the other, vector stacks many in one tensor, pool "
        "starts worker processes, flower sends Flower messages inside this process, and auto takes what suits the "
        "model and the machine.",
        panel="Execution",
    )
    workers: int | None = setting(
        None,
        "Start this many processes for the pool fleet. The number changes the speed, but no byte of the result.",
        panel="Execution",
        unset_meaning="one per core",
        ge=1,
    )
    pieces: int | None = setting(
        None,
        "Divide the clients of a round into this many pieces. One worker trains the clients of a piece together. "
        "Runs with the same number give the same bytes on any number of cores.",
        panel="Execution",
        unset_meaning="the number of cores for the pool fleet, else no pieces",
        ge=1,
    )
    eval_every: int = setting(
        1, "Evaluate once in this many rounds, and always after the last one.", panel="Evaluation", ge=1
    )
    device: str = setting(
        "cpu",
        "Keep the data, the models and the clients' state on this PyTorch device: cpu, cuda, mps or xpu, with a number "
        "where there are several, such as cuda:1.",
        panel="Execution",
        scope="device",
    )
    max_train_samples: int | None = setting(
        None,
        "Use only this many of the training samples, drawn at random with the same fraction of every class.",
        panel="Data",
        scope="data",
        unset_meaning="all training samples",
        ge=1,
    )
    min_samples: int = setting(
        10,
        "Give every client at least this many samples. Samples for validation and testing count too.",
        panel="Clients",
        scope="partition",
        ge=1,
    )
    val_fraction: float = setting(
        0.1,
        "Use this fraction of each client's samples for validation.",
        panel="Evaluation",
        scope="partition",
        ge=0,
        lt=1,
    )
    test_fraction: float = setting(
        0.2,
        "Use this fraction of each client's samples for testing.",
        panel="Evaluation",
        scope="partition",
        gt=0,
        lt=1,
    )
    label_column: str = setting(
        "label", "Read the labels from this column of your own table.", panel="Data", scope="data"
    )
    client_column: str | None = setting(
        None,
        "Read from this column of your own table which client has the sample. The partition is then natural unless "
        "another is given.",
        panel="Data",
        scope="data",
        unset_meaning="no column",
    )
    sensitive_fraction: float | None = setting(
        None,
        "Mark this fraction of each client's samples, drawn at random, as sensitive. The method scmoe shares no model "
        "that was trained on sensitive samples.",
        panel="Privacy",
        scope="partition",
        unset_meaning="0.3, unless there is a sensitive column",
        ge=0,
        lt=1,
    )
    sensitive_column: str | None = setting(
        None,
        "Read from this column of your own data which samples are sensitive: 1 or true if they are, 0 or false if not.",
        panel="Privacy",
        scope="data",
        unset_meaning="no column",
    )
    drop_columns: tuple[str, ...] = setting(
        (),
        "Leave these columns of your own table out of the features.",
        panel="Data",
        scope="data",
        flag="--drop-column",
        unset_meaning="no column",
    )
    public_samples: int | None = setting(
        None,
        "Set this many training samples aside for the server. They are public, and no client has them.",
        panel="Data",
        scope="partition",
        unset_meaning="the number that the method needs",
        ge=0,
    )
    edges: Annotated[str | None, BeforeValidator(_normalise_edges, json_schema_input_type=int | str | None)] = setting(
        None,
        "Put this many edge servers between the clients and the cloud: 5 or random:5 divides the clients at random, "
        "similar:5 brings similar label distributions together, diverse:5 makes each edge server as diverse as "
        "possible, and none means no edge servers.",
        panel="Edges",
        unset_meaning="none, unless the method has some",
    )
    edge_column: str | None = setting(
        None,
        "Read from this column of your own table to which edge server the client of the sample belongs.",
        panel="Edges",
        scope="data",
        unset_meaning="no column",
    )
    cloud_every_rounds: int | None = setting(
        None,
        "Average the models of the edge servers in the cloud once in this many rounds.",
        panel="Edges",
        unset_meaning="5 if there are edge servers",
        ge=1,
    )
    cloud_link: str | None = setting(
        None,
        "Model the traffic between the edge servers and the cloud as this link: wifi, wifi-slow, lte-m or ethernet.",
        panel="Edges",
        unset_meaning="ethernet if there are edge servers",
    )
    unseen: int | float | None = setting(
        None,
        "Exclude this many clients from training, so that `shoal evaluate --unseen` can test on them. A whole number "
        "counts clients, and a decimal number below 1 is a fraction of all clients.",
        panel="Clients",
        scope="partition",
        unset_meaning="no unseen clients",
    )
    keep_checkpoints: int = setting(
        3, "Keep this many of the newest checkpoints in the run directory.", panel="Execution", scope="storage", ge=1
    )
    devices: str = setting(
        "pi",
        "Model the clients' computation in seconds and joules as on this device: microcontroller, pi, phone, jetson, "
        "server, your own as file.toml#table, or a random mix such as pi:0.7,phone:0.3.",
        panel="Devices and energy",
    )
    link: str = setting(
        "wifi",
        "Model the clients' traffic in seconds and joules as on this link: wifi, wifi-slow, lte-m or ethernet.",
        panel="Devices and energy",
    )
    radio_w: float | None = setting(
        None,
        "Assume that the electronics of a client's radio draw this many watts during a transfer.",
        panel="Devices and energy",
        unset_meaning="the value of the link",
        ge=0,
    )
    count_idle: bool = setting(
        False,
        "Count also the joules that a client uses while it waits for slower clients.",
        panel="Devices and energy",
    )
    battery_joules: float | None = setting(
        None,
        "Give each client a battery of this many joules. A client with an empty battery drops out of the run.",
        panel="Devices and energy",
        unset_meaning="no limit",
        gt=0,
    )
    budget_joules: float | None = setting(
        None,
        "End the run after the round in which all clients together have used this many joules. What the server uses "
        "does not count.",
        panel="Devices and energy",
        unset_meaning="no limit",
        gt=0,
    )
    deadline_s: float | None = setting(
        None,
        "Drop a client's report that takes longer than this many simulated seconds in its stage.",
        panel="Devices and energy",
        unset_meaning="no limit",
        gt=0,
    )
    measure: Literal["none", "codecarbon"] = setting(
        "none",
        "Measure the energy that this machine uses for the simulation: codecarbon measures it with CodeCarbon, and "
        "none turns the measurement off.",
        panel="Devices and energy",
        scope="measurement",
    )
    country: str | None = setting(
        None,
        "Compute the CO2 of the measured energy for the electricity of this country, written as three letters such as "
        "ESP.",
        panel="Devices and energy",
        scope="measurement",
        unset_meaning="the world's average",
    )
    set: dict[str, dict[str, Any]] = setting(
        {},
        "Change options of the method's pieces, such as train.mu=0.1. `shoal methods NAME` lists them.",
        panel="Model and method",
        unset_meaning="no option",
    )

    @property
    def has_natural_partition(self) -> bool:
        """Whether the data name the client of each sample."""
        return self.partition.split("+")[0].split(":")[0] == "natural"

    def num_training_clients(self, num_clients: int) -> int:
        """Returns the number of clients that train, out of `num_clients`."""
        if not self.unseen:
            return num_clients
        from shoal.data.unseen import num_held_out

        return num_clients - num_held_out(num_clients, self.unseen)

    def cohort_size(self, num_clients: int) -> int:
        """Returns the number of clients per round, out of `num_clients` that train."""
        size = self.cohort
        if isinstance(size, float):
            if not 0 < size <= 1:
                raise UserError(f"cohort is {size}; a fraction must be above 0 and at most 1.0")
            return max(1, round(size * num_clients))
        if not 1 <= size <= num_clients:
            raise UserError(f"cohort is {size}; it must be between 1 and the number of clients, {num_clients}")
        return size


SETTINGS = declarations(Job)
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than")


def make_job(values: Mapping[str, Any]) -> Job:
    """Returns the job with these settings. A client column makes the natural partition the default."""
    if values.get("client_column") is not None and "partition" not in values:
        values = {**values, "partition": "natural"}
    try:
        job = Job(**values)
    except ValidationError as error:
        raise UserError(_error_sentence(error.errors()[0], values)) from None
    if job.sensitive_fraction is not None and job.sensitive_column is not None:
        raise UserError(
            f"sensitive_fraction is {job.sensitive_fraction} and sensitive_column is {job.sensitive_column!r}. Set one "
            "of them: the fraction of each client's samples, or the column that marks the samples."
        )
    if job.edge_column is not None and not job.has_natural_partition:
        raise UserError(
            f"edge_column is {job.edge_column!r}, but partition {job.partition!r} does not keep the clients of the "
            "data. Leave the partition out, and name the clients with --client-column."
        )
    if job.edges is not None and job.edge_column is not None:
        raise UserError(
            f"edges is {job.edges!r} and edge_column is {job.edge_column!r}. Set one of them: the number of edge "
            "servers, or the column with the edge server of each client."
        )
    if job.client_column is not None and not job.has_natural_partition:
        raise UserError(
            f"client_column is {job.client_column!r}, but partition {job.partition!r} divides the samples again. "
            "Use --partition natural, or leave the column out with --drop-column."
        )
    return job


def _error_sentence(problem: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    field = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(field, Job.model_fields) or f" (known: {', '.join(Job.model_fields)})"
        return f"key {field!r} is not known{hint}"
    if isinstance(user_error := problem.get("ctx", {}).get("error"), UserError):
        return str(user_error)
    declared = SETTINGS[field]
    expected = declared.bounds if problem["type"] in _OUT_OF_RANGE else declared.accepted
    if problem["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    return f"{field} is {_as_written(values[field])}: it must be {expected}"


def _as_written(value: Any) -> str:
    """Returns a value as users write it. The flag --lr -1 arrives as -1.0."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else repr(value)


def parse_options(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the options of `--set` flags: ["train.mu=0.1"] becomes {"train": {"mu": 0.1}}."""
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
        return parse_toml(f"x = {text}")["x"]
    except UserError:
        return text


def parse_amount(flag: str, text: str) -> int | float:
    """Returns a number of clients (int) or a fraction of the clients (float)."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(
            f"{flag} {text!r} is neither a number of clients such as 10 nor a fraction such as 0.1"
        ) from None
    if not math.isfinite(value):
        raise UserError(f"{flag} {text!r} is not a finite number of clients")
    return int(text) if text.strip().lstrip("+-").isdigit() else value
