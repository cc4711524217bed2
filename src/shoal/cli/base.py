"""What every command has in common: where it prints, and how it says what is wrong."""

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
    """click 8.5 gives arguments a help of its own, which overwrites the one that typer 0.20 was given."""

    def __init__(self, *, help: str | None = None, **kw: Any) -> None:
        super().__init__(help=help, **kw)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]

app = typer.Typer(
    help="Federated learning for fleets of edge devices whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
data_app = typer.Typer(help="Data sets and how they are divided among clients.", no_args_is_help=True)
app.add_typer(data_app, name="data")

out = Console(width=None if sys.stdout.isatty() else 160)  # a pipe or a log does not wrap
err = Console(stderr=True)
started_runs: list[Path] = []  # the run, for the word of farewell

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
OutPath = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Keep the run in this directory.", show_default="a free name under runs/"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file that shoal did not write.")]


@contextmanager
def user_errors(as_json: bool) -> Iterator[None]:
    """Bad input is one sentence and exit code 2; a stop by the user is 130."""
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
            f"stopped; `shoal resume {started_runs[-1] if started_runs else 'RUN'}` goes on from the last complete round",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None


@contextmanager
def hint_repeat_command(command: str) -> Iterator[None]:
    """A stop of several runs: the command that began them goes on with them."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped; the same command, `{command}` with the same flags, goes on", soft_wrap=True)
        raise typer.Exit(130) from None


def end_with_failures(num_failed: int, num_jobs: int, hint: str = "") -> None:
    """Says how many of several jobs failed, if any did, and ends the command with exit code 1."""
    if num_failed:
        err.print(
            f"{num_failed} of {num_jobs} {'job' if num_jobs == 1 else 'jobs'} failed{hint}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def escape_markup(text: str) -> str:
    return text.replace("[", r"\[")


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))
