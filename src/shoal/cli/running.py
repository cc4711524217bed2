"""Runs jobs for the commands: paths of runs, progress, tables and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.base import end_with_failures, err, escape_markup, out, print_json, started_runs
from shoal.errors import UnusedOption, UserError, did_you_mean


def free_path(name: str, suffix: str = "", taken_paths: Collection[Path] = ()) -> Path:
    """Returns runs/NAME, or the first free one of runs/NAME-2, runs/NAME-3 and so on."""
    path, number = Path("runs") / f"{name}{suffix}", 1
    while path.exists() or path in taken_paths:
        number += 1
        path = Path("runs") / f"{name}-{number}{suffix}"
    return path


def find_recipe(name: str) -> Path | None:
    """Returns the file of the recipe that `name` names, or None if `name` names a method."""
    from shoal.experiment.recipe import RECIPES
    from shoal.methods import METHODS, is_method

    if is_method(name) and not name.endswith(".toml"):
        return None
    path = RECIPES.find(name)
    if path is None:
        near = did_you_mean(name.removesuffix(".toml"), [*METHODS, *RECIPES.files()])
        hint = near or "; `shoal methods` and `shoal recipes` list the names"
        raise UserError(f"{name!r} is not a method, not a recipe file, and not a packaged recipe{hint}")
    return path


def expand_run_folders(names: list[str], methods: Collection[str] = ()) -> list[str]:
    """Replaces each folder of runs, such as that of a grid, by its runs. HTML pages beside runs are left out."""
    from shoal.store.reader import find_run_folders

    without_pages = [n for n in names if n in methods or not (n.endswith(".html") and Path(n).is_file())] or names
    runs_in = {n: [] if n in methods else [str(run) for run in find_run_folders(Path(n))] for n in without_pages}
    return [run for name in without_pages for run in runs_in[name] or [name]]


def default_run_path(job: Any, recipe_name: str = "composed", taken_paths: Collection[Path] = ()) -> Path:
    """Returns a free path. A composition has the name of its recipe, because the names of its pieces are too long."""
    method = recipe_name if "=" in job.method else job.method
    return free_path(f"{method}-{Path(job.data).stem}-seed{job.seed}".replace(":", ""), taken_paths=taken_paths)


@contextmanager
def show_progress(job: Any, path: Path, title: str = "") -> Iterator[dict[str, Any]]:
    """Shows the progress of a run. Yields the callbacks for `run_job` and `resume_run`."""
    from shoal.cli.progress import DownloadProgress, RunProgress

    with DownloadProgress(err) as download, RunProgress(err, title or job.method, job.rounds) as progress:
        yield {
            "on_setup": announce_on_setup(path),
            "on_round": progress.on_round,
            "on_end": progress.on_end,
            "progress": download,
        }


def run_jobs(jobs: Mapping[str, tuple[Path, Any]]) -> int:
    """Runs the unfinished jobs one after the other and returns the number of failed jobs.

    A job that fails leaves a record, and the others still run.
    """
    from shoal.experiment.run import run_or_resume
    from shoal.store.failure import record_exceptions

    failed: list[str] = []
    for number, (label, (path, job)) in enumerate(jobs.items(), start=1):
        title = f"[{number}/{len(jobs)}] {label}"
        if (path / "result.json").exists():
            err.print(f"{escape_markup(title)} is finished", highlight=False)
            continue

        def report_failure(reason: str, title: str = title) -> None:
            failed.append(title)
            err.print(f"{title} failed: {reason}", highlight=False, markup=False, soft_wrap=True)

        with (
            record_exceptions(path, job.model_dump(mode="json"), report_failure),
            show_progress(job, path, title) as callbacks,
        ):
            run_or_resume(job, path, **callbacks)
    return len(failed)


def announce_on_setup(path: Path) -> Callable[[Any], None]:
    """Returns a callback that prints the run and its directory, after all checks have passed."""

    def announce(experiment: Any) -> None:
        started_runs.append(path)
        err.print(f"run directory: {path}", highlight=False, soft_wrap=True)
        announce_run(experiment)

    return announce


def _edges_text(experiment: Any) -> str:
    kind, _, number = (experiment.job.edges or "column").partition(":")
    count = int(number or len(set((experiment.federation.edge_of_client or {}).values())))
    shared = (
        f" that share a cohort of {experiment.cohort}, with at least one client each"
        if experiment.cohort is not None
        else ""
    )
    edges = "1 edge server" if count == 1 else f"{count} edge servers ({kind})"
    return f"{edges}{shared}, averaged in the cloud every {experiment.job.cloud_every_rounds} rounds"


def announce_run(experiment: Any) -> None:
    """Prints one line about the experiment."""
    job = experiment.job
    note = f" ({experiment.federation.note})" if experiment.federation.note else ""
    cohort = f"{experiment.cohort} per round, " if experiment.cohort is not None else ""
    cohort = f"{_edges_text(experiment)}, " if job.cloud_every_rounds else cohort
    cohort = f"{job.unseen} of them unseen, {cohort}" if job.unseen else cohort
    err.print(
        f"{job.method} on {job.data}{note}: {job.clients} clients by {job.partition}, {cohort}"
        f"{job.model} with {experiment.model.num_parameters:,} parameters, {job.fleet} fleet, seed {job.seed}",
        highlight=False,
        soft_wrap=True,
    )


def read_runs(paths: Iterable[Path], **read_options: Any) -> list[Any]:
    """Returns the records of the runs, also of runs that failed before their first round."""
    from shoal.store.reader import read_run

    return [read_run(path, allow_not_started=True, **read_options) for path in paths]


def print_run_table(records: list[Any]) -> None:
    """Prints the metrics of one run, or a table of several runs."""
    from shoal.report import compare_table, result_table

    out.print(result_table(records) if len(records) == 1 else compare_table(records))


def run_grid(recipe: Any, folder: Path, as_json: bool, force: bool = False) -> None:
    """Runs all jobs of a recipe, each in its own run directory. Finished runs are not run again."""
    from shoal.experiment.assemble import validate_job
    from shoal.experiment.run import check_same_job
    from shoal.methods import METHODS
    from shoal.report import PAGE, paper_view, summarise, write_page
    from shoal.reproduce.paper_table import compare_with_paper, validate_paper
    from shoal.store.outputs import check_output
    from shoal.store.reader import planned_run

    page = folder / "report.html"
    check_output(page, PAGE, force)
    jobs = {label: (folder / label, job) for label, job in recipe.jobs.items()}
    if recipe.paper is not None:
        validate_paper(recipe.paper, [planned_run(path, job.model_dump()) for path, job in jobs.values()], METHODS)
    with hint_only_table(len({job.method for job in recipe.jobs.values()})):
        for path, job in jobs.values():  # now, because the runs may take hours
            if is_started := (path / "config.json").exists():
                check_same_job(path, job)
            if not (path / "result.json").exists():
                validate_job(job, None if is_started else path)
    failed = run_jobs(jobs)
    records = read_runs(path for path, _ in jobs.values())
    paper = None
    if recipe.paper is not None:
        paper = compare_with_paper(records, recipe.paper)
        records = [
            replace(record, accuracy_key=paper.accuracy_key, joules_scope=paper.joules_scope) for record in records
        ]
    write_page(records, page, recipe.title, paper=paper, force=force)
    if as_json:
        paper_facts = {"paper": paper.to_json()} if paper is not None else {}
        print_json({"title": recipe.title, "runs": summarise(records), **paper_facts, "report": str(page)})
    else:
        out.print(f"[bold]{escape_markup(recipe.title)}")
        print_run_table(records)
        if paper is not None:
            out.print(paper_view(paper))
        out.print(f"report: {page}", highlight=False, soft_wrap=True)
    end_with_failures(failed, len(jobs), " The same command runs them again.")


def finish_comparison(records: list[Any], page: Path, as_json: bool, request: Any = None, force: bool = False) -> None:
    """Writes the page of a comparison and prints its tables."""
    from shoal.report import Comparison, ComparisonRequest, report_table_view, summarise, write_page

    request = request or ComparisonRequest()
    comparison = Comparison(records, request)
    write_page(records, page, request=request, force=force)
    if as_json:
        print_json({"runs": summarise(records), **comparison.to_json(), "report": str(page)})
        return
    print_run_table(records)
    for table in comparison.tables():
        out.print(report_table_view(table))
    out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)


@contextmanager
def hint_only_table(num_methods: int) -> Iterator[None]:
    """Adds a hint to the error about an option that only some of several methods have."""
    try:
        yield
    except UnusedOption as error:
        if num_methods == 1:
            raise
        raise UserError(f"{error}; an option of only one METHOD goes under [only.METHOD] of a recipe") from None
