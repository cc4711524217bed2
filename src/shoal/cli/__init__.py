"""The command line.

Results go to stdout, and everything else goes to stderr. With `--json`, stdout is one JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import click
import typer

from shoal.cli.base import app, err, escape_markup

# isort: off
from shoal.cli import runs, study, serving, methods, recipes, data  # noqa: F401  (the help lists commands in this order)
# isort: on


def _version(is_requested: bool) -> None:
    if is_requested:
        from shoal import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of shoal and exit.")
    ] = False,
) -> None:
    from shoal.cli.progress import setup_logging

    setup_logging(err)


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        err.print(f"[bold red]error:[/] {escape_markup(error.format_message())}", highlight=False, soft_wrap=True)
        if "--json" in sys.argv:
            print(json.dumps({"error": error.format_message()}))
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
