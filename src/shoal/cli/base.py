"""What all commands share: the consoles, common options and the handling of errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperArgument

from shoal.errors import UserError, one_line_message


class _Argument(TyperArgument):
    """Keeps the help of an argument, which click 8.5 would overwrite in typer 0.20."""

    def __init__(self, *, help: str | None = None, **kw: Any) -> None:
        super().__init__(help=help, **kw)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]

app = typer.Typer(
    help="Simulate federated learning for fleets of edge devices whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
data_app = typer.Typer(
    help="List, download and show data sets, and show how they are divided among clients.", no_args_is_help=True
)
app.add_typer(data_app, name="data")

out = Console(width=None if sys.stdout.isatty() else 160)  # lines in a pipe or a log are not wrapped
err = Console(stderr=True)
started_runs: list[Path] = []  # runs that Ctrl-C may stop, the newest last

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
OutPath = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the run into this directory.", show_default="a free name under runs/"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file that shoal did not write.")]


@contextmanager
def user_errors(as_json: bool) -> Iterator[None]:
    """Prints an error of the user as one line and exits with code 2. Ctrl-C exits with code 130."""
    try:
        yield
    except (UserError, OSError) as error:
        sentence = one_line_message(error)
        err.print(f"[bold red]error:[/] {escape_markup(sentence)}", highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"error": sentence}))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(
            f"Stopped. `shoal resume {started_runs[-1] if started_runs else 'RUN'}` continues from the last complete "
            "round.",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


@contextmanager
def hint_repeat_command(command: str) -> Iterator[None]:
    """Names the command that continues several runs, if Ctrl-C stops them."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"Stopped. The same command, `{command}` with the same flags, continues.", soft_wrap=True)
        raise typer.Exit(130) from None


def end_with_failures(num_failed: int, num_jobs: int, hint: str = "") -> None:
    """Prints how many jobs failed, if any did, and exits with code 1. `hint` says what to do."""
    if num_failed:
        err.print(
            f"{num_failed} of {num_jobs} {'job' if num_jobs == 1 else 'jobs'} failed.{hint}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def escape_markup(text: str) -> str:
    """Returns the text so that rich prints its brackets."""
    return text.replace("[", r"\[")


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON."""
    print(json.dumps(value, allow_nan=False))
