"""Commands around the prediction service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.base import AsJson, Force, app, err, out, print_json, told
from shoal.errors import UserError

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command()
def serve(
    run_dir: RunDir,
    host: Annotated[str, typer.Option(help="Where to listen; others than loopback need --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    tokens: Annotated[Path | None, typer.Option(help="A file of hashed tokens, as `shoal token` writes it.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS: a PEM file with the certificate chain.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS: a PEM file with the private key.")] = None,
    abstain_below: Annotated[
        float, typer.Option(min=0, max=1, help="No label for rows of less confidence, unless a request says otherwise.")
    ] = 0.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows that are answered in one pass.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long the first row of a pass waits for others.")] = 2.0,
    queue: Annotated[int, typer.Option(min=1, help="Rows that may wait; beyond it requests are answered 503.")] = 4096,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second of one token or address; 0: no limit.")] = 200.0,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Megabytes of a request.")] = 8.0,
    poll_s: Annotated[float, typer.Option(min=0.01, help="How often newer checkpoints are looked for.")] = 1.0,
) -> None:
    """Answer predictions over HTTP with a run's newest models, also while it is still training."""
    with told(False):
        listening, service = _served(run_dir, locals())
        from shoal.serve.server import serve as serve_now

        serve_now(
            service, listening, lambda url: err.print(f"serving {run_dir} on {url}", highlight=False, soft_wrap=True)
        )


def _served(run_dir: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    try:
        from shoal.serve.app import Service
        from shoal.serve.server import Listening
    except ImportError as error:
        raise UserError(
            f"shoal serve needs the extra of that name: pip install -c constraints.txt -e '.[serve]' ({error})"
        ) from None
    from shoal.serve.admission import Limits
    from shoal.serve.auth import tokens_from
    from shoal.serve.batching import Batching

    o = options
    batching = Batching(o["max_batch"], o["max_wait_ms"] / 1000, o["queue"])
    limits = Limits(body_bytes=int(o["max_body_mb"] * 2**20), per_s=o["rate"])
    listening = Listening(o["host"], o["port"], tokens_from(o["tokens"]), o["certificate"], o["key"], limits)
    return listening, Service(run_dir, batching, o["abstain_below"], o["poll_s"])


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose token it is: it is counted and limited under this name.")],
    file: Annotated[Path, typer.Option(help="Where its hash is added; give it to shoal serve --tokens.")] = Path(
        "tokens.txt"
    ),
    as_json: AsJson = False,
) -> None:
    """Make a token for `shoal serve`. It is shown this once: only its hash is kept."""
    with told(as_json):
        from shoal.serve.auth import new_token

        made = new_token(name, file)
        if as_json:
            print_json({"name": name, "token": made, "file": str(file)})
        else:
            err.print(f"its hash is in {file}; this is the token, shown only now:", highlight=False, soft_wrap=True)
            print(made)


@app.command()
def export(
    run_dir: RunDir,
    format: Annotated[str, typer.Option(help="onnx, torchscript or safetensors.")] = "onnx",
    cluster: Annotated[
        str | None,
        typer.Option(
            help="One cluster's model, by number or name; default: what a client that never trained is served."
        ),
    ] = None,
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File of the model, which ends in .onnx, .pt (torchscript) or .safetensors, as the format says. "
            "Default: served.ENDING, or the cluster's name, in the run directory.",
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, and check that the file gives the same answers."""
    with told(as_json):
        from dataclasses import asdict

        from shoal.serve.export import export as write

        made = write(run_dir, format, out_path, cluster, force)
        notes = list(made.notes)
        if made.accuracy is not None:
            notes.append(f"accuracy of the exported model on the central test set: {made.accuracy:.1%}")
        for note in notes:
            err.print(note, highlight=False, soft_wrap=True, markup=False)
        if as_json:
            print_json(asdict(made) | {"path": str(made.path)})
        else:
            rows = "any number of rows" if made.any_rows else "one row at a time"
            out.print(
                f"{made.path}: {made.name} of round {made.round} for {rows}, {made.bytes:,} bytes; "
                f"its answers differ from the model's by {made.difference:.1e} at most",
                highlight=False,
                soft_wrap=True,
            )
