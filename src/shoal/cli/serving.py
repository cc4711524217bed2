"""Commands for the prediction service: `shoal serve`, `shoal token` and `shoal export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.base import AsJson, Force, app, err, out, print_json, user_errors
from shoal.errors import UserError

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Use the models of the run in this run directory.")]


@app.command()
def serve(
    run_dir: RunDir,
    host: Annotated[
        str, typer.Option(help="Listen on this address. An address that other machines can reach needs --tokens.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Listen on this port. The value 0 takes a free one.")
    ] = 8000,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Accept only the tokens whose hashes `shoal token` wrote to this file.", show_default="no tokens"
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="Use TLS with the certificate chain in this PEM file. This needs --key.", show_default="no TLS"
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="Use TLS with the private key in this PEM file. This needs --certificate.", show_default="no TLS"
        ),
    ] = None,
    abstain_below: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Return no label for a sample that is predicted with less than this confidence. A request may set "
            "another value.",
        ),
    ] = 0.0,
    max_batch_samples: Annotated[int, typer.Option(min=1, help="Predict at most this many samples in one batch.")] = 64,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, help="Let the first sample of a batch wait this many milliseconds for others.")
    ] = 2.0,
    max_waiting_samples: Annotated[
        int, typer.Option(min=1, help="Let this many samples wait at most. Further requests get the status 503.")
    ] = 4096,
    max_requests_per_s: Annotated[
        float,
        typer.Option(
            min=0, help="Accept this many requests per second from one token or address. The value 0 sets no limit."
        ),
    ] = 200.0,
    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Refuse a request whose body has more than this many megabytes.")
    ] = 8.0,
    poll_s: Annotated[float, typer.Option(min=0.01, help="Look for a newer checkpoint every this many seconds.")] = 1.0,
) -> None:
    """Serve predictions over HTTP with the newest models of a run, also while the run is still training."""
    with user_errors(False):
        listening, service = _build_service(run_dir, locals())
        from shoal.serve.server import serve as serve_now

        serve_now(
            service, listening, lambda url: err.print(f"serving {run_dir} on {url}", highlight=False, soft_wrap=True)
        )


def _build_service(run_dir: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    try:
        from shoal.serve.app import Service
        from shoal.serve.server import ListenOptions
    except ImportError as error:
        raise UserError(
            f"shoal serve needs the extra named serve: pip install -c constraints.txt -e '.[serve]' ({error})"
        ) from None
    from shoal.serve.admission import Limits
    from shoal.serve.auth import load_tokens
    from shoal.serve.batching import BatchOptions

    batching = BatchOptions(options["max_batch_samples"], options["max_wait_ms"] / 1000, options["max_waiting_samples"])
    limits = Limits(max_body_bytes=int(options["max_body_mb"] * 2**20), requests_per_s=options["max_requests_per_s"])
    listening = ListenOptions(
        options["host"], options["port"], load_tokens(options["tokens"]), options["certificate"], options["key"], limits
    )
    return listening, Service(run_dir, batching, options["abstain_below"], options["poll_s"])


@app.command()
def token(
    name: Annotated[
        str, typer.Argument(help="Make a token for this caller. Its requests are counted and limited under this name.")
    ],
    file: Annotated[
        Path, typer.Option(help="Add the hash of the token to this file, for `shoal serve --tokens`.")
    ] = Path("tokens.txt"),
    as_json: AsJson = False,
) -> None:
    """Make a token for `shoal serve`. It is printed only once, because only its hash is stored."""
    with user_errors(as_json):
        from shoal.serve.auth import new_token

        secret = new_token(name, file)
        if as_json:
            print_json({"name": name, "token": secret, "file": str(file)})
        else:
            err.print(
                f"The hash of the token is in {file}. The token itself is printed only this once:",
                highlight=False,
                soft_wrap=True,
            )
            print(secret)


@app.command()
def export(
    run_dir: RunDir,
    file_format: Annotated[
        str, typer.Option("--format", help="Write the model in this format: onnx, torchscript or safetensors.")
    ] = "onnx",
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Export the model of this cluster, given by its number or name.",
            show_default="the model that serves unseen clients",
        ),
    ] = None,
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write the model to this file. Its name must end in .onnx, .pt (torchscript) or .safetensors.",
            show_default="a file in the run directory",
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a model of a run for other programs, and check that the file gives the same predictions."""
    with user_errors(as_json):
        from dataclasses import asdict

        from shoal.serve.export import export as export_model

        exported = export_model(run_dir, file_format, out_path, cluster, force)
        notes = list(exported.notes)
        if exported.accuracy is not None:
            notes.append(f"accuracy of the exported model on the central test set: {exported.accuracy:.1%}")
        for note in notes:
            err.print(note, highlight=False, soft_wrap=True, markup=False)
        if as_json:
            print_json(asdict(exported) | {"path": str(exported.path)})
        else:
            batch_text = "any number of samples" if exported.has_dynamic_batch else "one sample at a time"
            difference = f"{exported.max_logit_difference:.1e}"
            out.print(
                f"{exported.path}: {exported.model_name} of round {exported.round} for {batch_text}, "
                f"{exported.num_bytes:,} bytes; its logits differ from those of the model by at most {difference}",
                highlight=False,
                soft_wrap=True,
            )
