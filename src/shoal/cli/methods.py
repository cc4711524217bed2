"""Commands that tell what methods are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cli.base import AsJson, app, err, out, print_json, told
from shoal.cli.flags import FLAGS, job_flags, overrides
from shoal.errors import UserError


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the options of this method, of these pieces, or of the method of a recipe."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one."""
    with told(as_json):
        from shoal.methods import METHODS, options, summary

        if name and name.endswith(".toml"):
            name = _method_of(Path(name))
        chosen = [name] if name else list(METHODS)
        facts = [{"name": m, "summary": summary(m), "options": options(m)} for m in chosen]
        if as_json:
            print_json({"methods": facts})
            return
        table = Table(show_header=True, box=None, pad_edge=False)
        for heading in ("option", "default") if name else ("method", "what it is"):
            table.add_column(heading)
        if name:
            out.print(facts[0]["summary"], highlight=False, markup=False)
            for piece, keys in options(name).items():
                for key, default in keys.items():
                    table.add_row(f"--set {piece}.{key}=", str(default))
        else:
            for fact in facts:
                table.add_row(str(fact["name"]), str(fact["summary"]))
        out.print(table)


def _method_of(recipe: Path) -> str:
    from shoal.experiment.recipe import load_recipe

    found = {job.method for job in load_recipe(recipe, {}).jobs.values()}
    if len(found) > 1:
        raise UserError(f"recipe {recipe} has several methods; name one of them: {', '.join(sorted(found))}")
    return str(found.pop())


def _details(step: str) -> None:
    """Every piece of a step with what it sends and tells."""
    from shoal.errors import look_up
    from shoal.methods.pieces import PIECES

    told_of = {"sends": "each client sends", "keeps": "each client learns", "tells": "the server learns", "says": ""}
    for name, piece in look_up("step", step, PIECES).items():
        out.print(f"[bold]{name}[/]  [dim]{piece.source}[/]", highlight=False)
        for key, label in told_of.items():
            if (said := getattr(piece, key)) not in ("", "nothing"):
                out.print(f"  {label or 'to be known'}: {said}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def pieces(
    step: Annotated[str | None, typer.Argument(help="Describe in detail the pieces of this step.")] = None,
    as_json: AsJson = False,
) -> None:
    """List what can stand at each step of a method that is composed in a recipe."""
    with told(as_json):
        if step is not None and not as_json:
            _details(step)
            return
        from shoal.methods.pieces import PAPERS, PIECES

        known = {step: {name: piece.facts() for name, piece in found.items()} for step, found in PIECES.items()}
        if as_json:
            print_json({"pieces": known})
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("step", "piece", "from", "goes with"):
            table.add_column(heading, no_wrap=heading in ("step", "piece"), overflow="fold")
        for step, found in known.items():
            for i, (name, facts) in enumerate(found.items()):
                fits = "; ".join(f"{k}: {', '.join(v)}" for k, v in facts["needs"].items())
                table.add_row("" if i else step, name, facts["source"], fits)
        out.print(table)
        out.print(
            f"\nPapers: {', '.join(f'{n} {name}' for n, name in PAPERS.items())}.", highlight=False, soft_wrap=True
        )


@app.command()
@job_flags(*FLAGS)
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|RECIPE.toml", help="Explain this method, these pieces, or every method of this recipe."
        ),
    ],
    flags: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Say what a method does, step by step: what clients send and learn, what the server learns, what a round costs."""
    with told(as_json):
        from shoal.cli.progress import DownloadProgress, RunProgress
        from shoal.experiment.assemble import check_names, setup
        from shoal.experiment.explain import ROUNDS, explained
        from shoal.experiment.job import make_job
        from shoal.experiment.recipe import load_recipe
        from shoal.report.method_explanation import steps_view

        if what.endswith(".toml"):
            jobs = list(load_recipe(Path(what), overrides(flags)).jobs.values())
        else:
            jobs = [make_job(overrides(flags) | {"method": what})]
        first = {job.method: job for job in reversed(jobs)}
        found = []
        for job in (first[name] for name in dict.fromkeys(job.method for job in jobs)):
            check_names(job)
            with DownloadProgress(err) as download, RunProgress(err, f"playing {job.method}", ROUNDS + 1) as progress:
                found.append(explained(setup(job, download), on_round=progress.on_round))
        if as_json:
            print_json({"methods": found})
            return
        for facts in found:
            out.print(steps_view(facts))
