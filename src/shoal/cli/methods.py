"""Commands that describe methods: `shoal methods`, `shoal pieces` and `shoal explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shoal.cli.base import AsJson, app, err, escape_markup, out, print_json, user_errors
from shoal.cli.flags import FLAGS, job_flags, overrides, user_flags
from shoal.cli.running import find_recipe
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.methods import AvailableOption


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the options of this method, of these pieces, or of the method of a recipe."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one with their defaults, accepted values and meanings."""
    with user_errors(as_json):
        from shoal.methods import METHODS, available_options, summary

        if name and (path := find_recipe(name)):
            name = _method_of_recipe(path)
        names = [name] if name else list(METHODS)
        if as_json:
            facts = [{"name": m, "summary": summary(m), "options": _option_facts(available_options(m))} for m in names]
            print_json({"methods": facts})
            return
        if name:
            out.print(f"{summary(name)}\nEach option is set with --set OPTION=VALUE.\n", highlight=False, markup=False)
            out.print(_options_table(available_options(name)))
            return
        table = Table(show_header=True, box=None, pad_edge=False)
        for heading in ("method", "what it is"):
            table.add_column(heading)
        for m in names:
            table.add_row(m, summary(m))
        out.print(table)


def _option_facts(options: Mapping[str, Mapping[str, AvailableOption]]) -> dict[str, dict[str, Any]]:
    return {
        piece: {k: {"default": o.default, "accepted": o.accepted_values, "meaning": o.meaning} for k, o in keys.items()}
        for piece, keys in options.items()
    }


def _options_table(options: Mapping[str, Mapping[str, AvailableOption]]) -> Table:
    table = Table(show_header=True, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("option", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("accepted", max_width=18)
    table.add_column("meaning", ratio=1)
    for piece, keys in options.items():
        for key, o in keys.items():
            table.add_row(*map(Text, (f"{piece}.{key}", _as_typed(o.default), o.accepted_values, o.meaning)))
    return table


def _as_typed(value: Any) -> str:
    """Returns a default as a user writes it after `--set OPTION=`."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _method_of_recipe(recipe: Path) -> str:
    from shoal.experiment.recipe import load_recipe

    names = {job.method for job in load_recipe(recipe, {}).jobs.values()}
    if len(names) > 1:
        raise UserError(f"recipe {recipe} has several methods. Name one of them: {', '.join(sorted(names))}.")
    return str(names.pop())


def _print_pieces_of_step(step: str) -> None:
    """Prints for every piece of a step what it is, what leaves the client, and what it requires."""
    from shoal.errors import look_up
    from shoal.methods.composition.piece import pieces as pieces_by_step

    labels = {
        "client_sends": "each client sends",
        "client_keeps": "each client keeps",
        "server_learns": "the server learns",
        "requires": "requires",
        "provides": "provides",
        "remark": "remark",
    }
    for name, piece in look_up("step", step, pieces_by_step()).items():
        facts = piece.facts()
        default = " (default)" if piece.is_default else ""
        out.print(f"[bold]{name}[/]{default}  [dim]{escape_markup(piece.source)}[/]", highlight=False)
        out.print(f"  {facts['summary']}", highlight=False, markup=False, soft_wrap=True)
        for key, label in labels.items():
            text = "; ".join(facts[key]) if isinstance(facts[key], list) else facts[key]
            if text not in ("", "nothing"):
                out.print(f"  {label}: {text}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def pieces(
    step: Annotated[str | None, typer.Argument(help="Describe in detail the pieces of this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the pieces that can stand at each step of a method."""
    with user_errors(as_json):
        if step is not None and not as_json:
            _print_pieces_of_step(step)
            return
        from shoal.methods.composition.piece import pieces as pieces_by_step

        facts_by_step = {
            step: {name: piece.facts() for name, piece in pieces_of_step.items()}
            for step, pieces_of_step in pieces_by_step().items()
        }
        if as_json:
            print_json({"pieces": facts_by_step})
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("step", "piece", "what it is", "requires"):
            table.add_column(heading, no_wrap=heading in ("step", "piece"), overflow="fold")
        for step, facts_by_piece in facts_by_step.items():
            for i, (name, facts) in enumerate(facts_by_piece.items()):
                table.add_row("" if i else step, name, facts["summary"], "; ".join(facts["requires"]))
        out.print(table)
        out.print(
            "\nThe first piece of a step is its default. `shoal pieces STEP` describes the pieces of a step.",
            highlight=False,
        )


@app.command()
@job_flags(*FLAGS)
def explain(
    method_or_recipe: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|RECIPE", help="Explain this method, these pieces, or every method of this recipe."
        ),
    ],
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Explain a method step by step: what clients send, what the server learns, and what a round costs."""
    with user_errors(as_json):
        from shoal.cli.progress import DownloadProgress, RunProgress
        from shoal.experiment.assemble import assemble_job, validate_job
        from shoal.experiment.explain import explain_method, rounds_to_run
        from shoal.experiment.job import make_job
        from shoal.experiment.recipe import load_recipe
        from shoal.report.method_explanation import steps_view

        if path := find_recipe(method_or_recipe):
            jobs = list(load_recipe(path, overrides(user_flags(flags))).jobs.values())
        else:
            jobs = [make_job(overrides(user_flags(flags)) | {"method": method_or_recipe})]
        first_jobs = {job.method: job for job in reversed(jobs)}
        explanations = []
        for job in (first_jobs[name] for name in dict.fromkeys(job.method for job in jobs)):
            validate_job(job)
            with DownloadProgress(err) as download:
                experiment = assemble_job(job, download)
            with RunProgress(err, f"running {job.method}", len(rounds_to_run(experiment))) as progress:
                explanations.append(explain_method(experiment, on_round=progress.on_round))
        if as_json:
            print_json({"methods": explanations})
            return
        for facts in explanations:
            out.print(steps_view(facts))
