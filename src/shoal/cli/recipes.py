"""The command `shoal recipes`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from shoal.cli.base import AsJson, app, out, print_json, user_errors
from shoal.errors import look_up


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Print the text of this recipe or study, for example to start your own from it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes and studies that are installed with shoal, and the number of jobs of each."""
    with user_errors(as_json):
        from shoal.experiment.recipe import RECIPES

        if name is None:
            _list(as_json)
            return
        text = look_up("recipe", name, RECIPES.files()).read_text(encoding="utf-8")
        if as_json:
            print_json({"name": name, "text": text})
        else:
            print(text, end="")


def _list(as_json: bool) -> None:
    from shoal.experiment.recipe import RECIPES, load_recipe
    from shoal.study.plan import load_study, packaged_studies

    studies = {name: load_study(path) for name, path in packaged_studies().items()}
    recipes = {name: load_recipe(path, {}) for name, path in RECIPES.files().items() if name not in studies}
    jobs = {name: {budget: len(study.entries(budget)) for budget in study.budgets} for name, study in studies.items()}
    if as_json:
        print_json(
            {
                "recipes": [{"name": n, "title": r.title, "num_jobs": len(r.jobs)} for n, r in recipes.items()],
                "studies": [{"name": n, "title": s.title, "num_jobs": jobs[n]} for n, s in studies.items()],
            }
        )
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("recipe", no_wrap=True)
    table.add_column("jobs", justify="right")
    table.add_column("title")
    for name, recipe in recipes.items():
        table.add_row(name, str(len(recipe.jobs)), recipe.title)
    for name, study in studies.items():
        table.add_row(name, "\n".join(f"{n} ({budget})" for budget, n in jobs[name].items()), study.title)
    out.print(table, highlight=False)
    out.print("\n`shoal run RECIPE` runs a recipe. `shoal study STUDY` runs a study.", highlight=False)
