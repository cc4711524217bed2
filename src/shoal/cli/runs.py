"""Commands that start, resume, evaluate, compare and report runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cli.base import (
    AsJson,
    Force,
    OutPath,
    app,
    end_with_failures,
    err,
    hint_repeat_command,
    out,
    print_json,
    user_errors,
)
from shoal.cli.flags import FLAGS, job_flags, overrides, user_flags
from shoal.cli.running import (
    announce_run,
    default_run_path,
    expand_run_folders,
    find_recipe,
    finish_comparison,
    free_path,
    hint_only_table,
    print_run_table,
    read_runs,
    run_grid,
    run_jobs,
    show_progress,
)
from shoal.errors import UserError, did_you_mean


@app.command()
@job_flags(*FLAGS)
def run(
    method_or_recipe: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|RECIPE",
            help="Run this method, these pieces, or every job of this recipe. A recipe is a TOML file, or a name from "
            "`shoal recipes`. `shoal methods` lists the methods.",
        ),
    ],
    out_path: OutPath = None,
    force: Force = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Run a method, or every job of a recipe, and write each run into a directory."""
    with user_errors(as_json):
        from shoal.experiment.job import make_job
        from shoal.experiment.recipe import load_recipe
        from shoal.experiment.run import run_job
        from shoal.report import write_page

        path = find_recipe(method_or_recipe)
        if path is not None:
            recipe = load_recipe(path, overrides(user_flags(flags)))
            if recipe.single_job is None:
                folder = out_path or Path("runs") / path.stem
                with hint_repeat_command(f"shoal run {method_or_recipe} --out {folder}"):
                    run_grid(recipe, folder, as_json, force)
                return
            job = recipe.single_job
        else:
            job = make_job(overrides(user_flags(flags)) | {"method": method_or_recipe})
        run_path = out_path or default_run_path(job, path.stem if path else "composed")
        with show_progress(job, run_path) as callbacks:
            result = run_job(job, run_path, **callbacks)
        records = read_runs([run_path])
        page = write_page(records, run_path / "report.html")
        if as_json:
            print_json(result | {"report": str(page)})
        else:
            print_run_table(records)
            out.print(f"run:    {run_path}\nreport: {page}", highlight=False, soft_wrap=True)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Resume the run in this run directory.")],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Run the rest with this many processes of the pool.", show_default="the number in config.json"
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run that was stopped, from its last complete round."""
    with user_errors(as_json):
        from shoal.experiment.run import job_from_config, resume_run
        from shoal.report import PAGE, write_page
        from shoal.store.outputs import check_output
        from shoal.store.reader import find_run_folders, read_run

        if run_paths := find_run_folders(run_dir):
            raise UserError(
                f"{run_dir} is not a run but a folder of {len(run_paths)} runs. If a recipe wrote it, repeat `shoal "
                f"run RECIPE --out {run_dir}` with the same flags. Otherwise resume one run, such as {run_paths[0]}."
            )
        config = read_run(run_dir).config  # before the page is checked, for the better error
        check_output(run_dir / "report.html", PAGE, force)
        with show_progress(job_from_config(config), run_dir) as callbacks:
            result = resume_run(run_dir, workers=workers, **callbacks)
        records = read_runs([run_dir])
        page = write_page(records, run_dir / "report.html", force=force)
        if as_json:
            print_json(result | {"report": str(page)})
        else:
            print_run_table(records)
            out.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Evaluate the finished run in this run directory.")],
    unseen: Annotated[
        bool,
        typer.Option("--unseen", help="Evaluate the unseen clients instead, which were excluded from training."),
    ] = False,
    infer_from_inputs: Annotated[
        bool,
        typer.Option(
            "--infer-from-inputs",
            help="Infer the cluster or the class prior of each unseen client from its inputs, without labels. This "
            "needs --unseen.",
        ),
    ] = False,
    num_inputs: Annotated[
        int | None,
        typer.Option(
            "--num-inputs",
            help="Infer from this many inputs of each unseen client. This needs --infer-from-inputs.",
            show_default="all its inputs",
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Predict with another serving option, such as serve.rule=energy. Repeat the flag for more than one.",
            show_default="the options of the run",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the models of a finished run on its clients, or on unseen clients."""
    with user_errors(as_json):
        from shoal.cli.progress import DownloadProgress
        from shoal.experiment import evaluate
        from shoal.experiment.job import parse_options
        from shoal.report import evaluation_view

        if infer_from_inputs and not unseen:
            raise UserError(
                "--infer-from-inputs is given without --unseen. It works only for unseen clients. Add --unseen."
            )
        if num_inputs is not None and not infer_from_inputs:
            raise UserError("--num-inputs is given without --infer-from-inputs. Add --infer-from-inputs.")
        serving_options = parse_options(options or [])
        with DownloadProgress(err) as progress:
            if unseen:
                facts = evaluate.evaluate_unseen_clients(
                    run_dir, infer_from_inputs, progress, num_inputs, serving_options
                )
            else:
                facts = evaluate.evaluate_clients(run_dir, progress, serving_options)
        if as_json:
            print_json(facts)
        else:
            out.print(evaluation_view(facts))


@app.command()
def demo(as_json: AsJson = False) -> None:
    """Run four methods on scikit-learn's digits, offline, and write a page that compares them. It takes a minute."""
    with user_errors(as_json):
        from shoal.experiment.job import Job

        folder = free_path("demo")
        paths = [folder / method for method in ("shoal", "fedavg", "fedavg-ft", "local")]
        failed = run_jobs({path.name: (path, Job(method=path.name, rounds=30)) for path in paths})
        finish_comparison(read_runs(paths), folder / "report.html", as_json)
        end_with_failures(failed, len(paths))


@app.command()
@job_flags(*FLAGS)
def compare(
    runs_and_methods: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|METHOD...",
            help="Compare these run directories, all runs of these folders, and these methods, which are run first.",
        ),
    ],
    to_accuracy: Annotated[
        str | None,
        typer.Option(
            help="Report the joules, the simulated time and the rounds that it takes to sustain these accuracies, such "
            "as 0.4,0.5.",
            show_default="no accuracy",
        ),
    ] = None,
    at_budget: Annotated[
        str | None,
        typer.Option(
            help="Report the accuracy that is sustained within these joules: percentages of the reference, such as "
            "60,80,100, or amounts, such as 500J,2Wh.",
            show_default="no budget",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Take the joules of this run as 100 percent. Name it by its label in the table or as a RUN.",
            show_default="the runs of fedavg, or else the first run",
        ),
    ] = None,
    sustained_rounds: Annotated[
        int | None,
        typer.Option(
            help="Call an accuracy sustained if it lasts for this many evaluated rounds in a row.",
            show_default="a quarter of the shortest run's evaluated rounds, from 3 to 20",
        ),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            help="Compare by this accuracy: central is on the central test set, local is the mean over clients.",
            show_default="central if the runs have it",
        ),
    ] = None,
    joules: Annotated[
        str, typer.Option(help="Count these joules: all, or clients, which leaves out those of the server.")
    ] = "all",
    out_path: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the HTML page to this file.", show_default="a free name under runs/"),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Compare several runs in one table and on one page. Methods are run first, with the flags of this command."""
    with user_errors(as_json):
        from shoal.experiment.assemble import validate_job
        from shoal.experiment.job import SETTINGS, make_job
        from shoal.methods import METHODS, is_method
        from shoal.report import PAGE, ComparisonRequest, parse_accuracy, parse_joules_scope
        from shoal.store.outputs import check_output
        from shoal.store.reader import read_run

        if out_path is not None:
            check_output(out_path, PAGE, force)  # now, because the runs may take hours
        request = ComparisonRequest.parse(to_accuracy, at_budget, reference, sustained_rounds)
        read_options = {
            "accuracy_key": parse_accuracy("--accuracy", accuracy),
            "joules_scope": parse_joules_scope("--joules", joules),
        }
        methods = [m for m in runs_and_methods if not Path(m).is_dir() and is_method(m)]
        runs_and_methods = expand_run_folders(runs_and_methods, methods)
        jobs = {m: make_job(overrides(user_flags(flags)) | {"method": m}) for m in methods}
        for name in runs_and_methods:
            if name in jobs:
                with hint_only_table(len(jobs)):
                    validate_job(jobs[name])
            elif Path(name).exists():
                read_run(Path(name), allow_not_started=True)
            else:
                raise UserError(f"{name} is neither a run directory nor a method{did_you_mean(name, METHODS)}")
        if (unused := user_flags(flags)) and not jobs:
            raise UserError(
                f"{SETTINGS[next(iter(unused))].flag} is only for methods, but all arguments are runs. Leave it out."
            )
        path_of_method: dict[str, Path] = {}
        for name, job in jobs.items():
            path_of_method[name] = default_run_path(job, taken_paths=path_of_method.values())
        failed = run_jobs({name: (path_of_method[name], job) for name, job in jobs.items()})
        records = read_runs((path_of_method.get(name, Path(name)) for name in runs_and_methods), **read_options)
        finish_comparison(records, out_path or free_path("compare", ".html"), as_json, request, force)
        end_with_failures(failed, len(jobs))


@app.command()
@job_flags(*FLAGS)
def profile(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="Profile this method. `shoal methods` lists the methods.")
    ],
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Show where the time of a method's rounds goes."""
    with user_errors(as_json):
        from shoal.cli.progress import RunProgress
        from shoal.experiment.job import make_job
        from shoal.experiment.run import profile_job

        job = make_job(overrides(user_flags(flags)) | {"method": method})
        with RunProgress(err, method, job.rounds) as progress:
            parts = profile_job(job, on_setup=announce_run, on_round=progress.on_round)
        if as_json:
            print_json({"method": method, "rounds": job.rounds, "parts": parts})
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("part", "seconds", "ms per round", "fraction"):
            table.add_column(heading, justify="left" if heading == "part" else "right")
        for p in parts:
            table.add_row(p["part"], f"{p['seconds']:.2f}", f"{1e3 * p['per_round_s']:.1f}", f"{p['fraction']:.1%}")
        out.print(table)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Show these run directories, and all runs of these folders.")
    ],
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the HTML page to this file.", show_default="report.html in the first RUN"
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about one or more runs."""
    with user_errors(as_json):
        from shoal.report import write_page

        first = next((Path(r) for r in runs if Path(r).is_dir()), Path(runs[0]))
        page = write_page(
            read_runs(map(Path, expand_run_folders(runs))), out_path or first / "report.html", force=force
        )
        if as_json:
            print_json({"report": str(page)})
        else:
            out.print(str(page), highlight=False, soft_wrap=True)
