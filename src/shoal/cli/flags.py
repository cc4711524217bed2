"""The flags of a job."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

FLAGS: dict[str, Any] = {
    "data": Annotated[
        str | None,
        typer.Option(help="A set by name (`shoal data list`), or your own .npz, .parquet, .csv or folder."),
    ],
    "partition": Annotated[
        str | None,
        typer.Option(
            help="iid, dirichlet:ALPHA, equal:ALPHA, groups:RHO,ALPHA, labels:0-2/3-9, shards:K, quantity:ALPHA, "
            "natural; shifts may follow: +rotate:0,90 +invert:SHARE +noise:SIGMA +mislabel:SHARE +permute:SHARE "
            "(default dirichlet:0.3; natural with --client-column)."
        ),
    ],
    "clients": Annotated[int | None, typer.Option(help="How many clients (default 20; natural: all).")],
    "rounds": Annotated[int | None, typer.Option(help="Global rounds (default 20).")],
    "cohort": Annotated[
        str | None, typer.Option(help="Clients per round: a number, or a share such as 0.1 (default 0.25).")
    ],
    "epochs": Annotated[int | None, typer.Option(help="Local epochs per round (default 2).")],
    "batch_size": Annotated[int | None, typer.Option(help="Rows per local step (default 32).")],
    "lr": Annotated[float | None, typer.Option(help="Learning rate (default 0.1).")],
    "momentum": Annotated[float | None, typer.Option(help="Momentum of the local SGD (default 0).")],
    "model": Annotated[
        str | None,
        typer.Option(
            help="mlp (default), mlp-dropout, linear, cnn-cifar, cnn-fedavg, resnet18, resnet18-batchnorm, "
            "or your own package.module:Class."
        ),
    ],
    "seed": Annotated[int | None, typer.Option(help="All chance follows from it (default 0).")],
    "fleet": Annotated[
        str | None, typer.Option(help="auto (default), plain, vector, pool, or flower (in this process).")
    ],
    "workers": Annotated[
        int | None,
        typer.Option(
            help="Number of processes of the pool. It changes the speed, but no byte of the result. Default: one "
            "per core."
        ),
    ],
    "pieces": Annotated[
        int | None,
        typer.Option(
            help="Number of pieces into which the work of a round is cut. The clients of a piece are trained together "
            "by one worker, so runs with the same number give the same bytes on any number of cores. Default: a pool "
            "takes the number of cores when the run starts and keeps it; other fleets do not cut."
        ),
    ],
    "eval_every": Annotated[int | None, typer.Option(help="Evaluate every N rounds, and after the last (default 1).")],
    "device": Annotated[str | None, typer.Option(help="Where tensors live: cpu (default), cuda, ...")],
    "rows": Annotated[int | None, typer.Option(help="Use a stratified subsample of this many training rows.")],
    "min_size": Annotated[int | None, typer.Option(help="Rows that every client must have (default 10).")],
    "val_share": Annotated[float | None, typer.Option(help="Of each client's rows, for validation (default 0.1).")],
    "test_share": Annotated[float | None, typer.Option(help="Of each client's rows, for testing (default 0.2).")],
    "keep": Annotated[int | None, typer.Option(help="How many checkpoints to keep (default 3).")],
    "devices": Annotated[
        str | None,
        typer.Option(
            help="What clients are, for seconds and joules: pi (default), microcontroller, phone, jetson, server, "
            "or a mix such as pi:0.7,phone:0.3."
        ),
    ],
    "link": Annotated[
        str | None, typer.Option(help="How clients are connected: wifi (default), wifi-slow, lte-m, ethernet.")
    ],
    "radio_w": Annotated[float | None, typer.Option(help="Watts of a radio's electronics while it is on.")],
    "count_idle": Annotated[bool | None, typer.Option(help="Charge clients for waiting until all are done.")],
    "battery": Annotated[float | None, typer.Option(help="Joules of each client; who has used them up leaves.")],
    "budget_joules": Annotated[
        float | None,
        typer.Option(help="Joules of all clients together, without the server's; when they are spent the run ends."),
    ],
    "deadline_s": Annotated[
        float | None, typer.Option(help="Simulated seconds of a stage; a report that takes longer is dropped.")
    ],
    "measure": Annotated[
        str | None, typer.Option(help="codecarbon: also measure what this machine uses (default none).")
    ],
    "country": Annotated[str | None, typer.Option(help="Three letters, such as ESP, for the CO2 of what is measured.")],
    "label_column": Annotated[str | None, typer.Option(help="Column with the label in a table (default: label).")],
    "client_column": Annotated[
        str | None, typer.Option(help="Column that says whose row it is; asks for --partition natural.")
    ],
    "sensitive": Annotated[
        float | None, typer.Option(help="Share of a client's rows that are sensitive (default 0.3), for scmoe.")
    ],
    "sensitive_column": Annotated[str | None, typer.Option(help="Column of 0 and 1 that says which rows these are.")],
    "edges": Annotated[
        str | None,
        typer.Option(
            help="Edge servers between clients and the cloud: how many, such as 5, and who is together: chance:5 (the "
            "default), alike:5 or mixed:5 by labels (default: no edges)."
        ),
    ],
    "edge_column": Annotated[str | None, typer.Option(help="Or the column that names the edge of a row's client.")],
    "cloud_every": Annotated[
        int | None, typer.Option(help="Rounds between two averages of the edges' models in the cloud (default 5).")
    ],
    "long_link": Annotated[
        str | None, typer.Option(help="How edges are connected to the cloud: ethernet (default), wifi, lte-m, ...")
    ],
    "drop_column": Annotated[list[str] | None, typer.Option(help="A column to leave out; may be repeated.")],
    "public": Annotated[
        int | None, typer.Option(help="Rows that no client holds, for the server (default: as the method wants).")
    ],
    "unseen": Annotated[
        str | None,
        typer.Option(
            help="Clients to hold out of training, a number or a share such as 0.2: `shoal evaluate --unseen`."
        ),
    ],
    "set": Annotated[
        list[str] | None, typer.Option(help="An option of a stage, such as train.mu=0.1; may be repeated.")
    ],
}
OF_DATA = (
    *("partition", "clients", "seed", "rows", "min_size", "val_share", "test_share"),
    *("label_column", "client_column", "sensitive", "sensitive_column", "edge_column", "drop_column", "public"),
)


def job_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the job's flags; it receives those that were set as the dict `flags`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in signature(command).parameters.values() if p.name != "flags"]
        added = [Parameter(n, Parameter.KEYWORD_ONLY, default=None, annotation=FLAGS[n]) for n in names]

        @wraps(command)
        def wrapped(**given: Any) -> None:
            flags = {n: given.pop(n) for n in names}
            command(flags={n: v for n, v in flags.items() if v is not None}, **given)

        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own] + added
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return add


def overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The job's keys that were given as flags."""
    from shoal.experiment.job import parse_amount, parse_options

    given = dict(flags)
    for key in given.keys() & {"cohort", "unseen"}:
        given[key] = parse_amount(f"--{key}", given[key])
    if "drop_column" in given:
        given["drop_columns"] = tuple(given.pop("drop_column"))
    given["set"] = parse_options(given.pop("set", []))
    return given
