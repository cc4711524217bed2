"""How commands play runs, tell of them, and write their pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.base import end_with_failures, err, escape_markup, out, print_json, started_runs
from shoal.errors import UnusedOption, UserError, did_you_mean


def free_path(name: str, suffix: str = "", taken_paths: Collection[Path] = ()) -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, ... that is not taken."""
    path, n = Path("runs") / f"{name}{suffix}", 1
    while path.exists() or path in taken_paths:
        n += 1
        path = Path("runs") / f"{name}-{n}{suffix}"
    return path


def find_recipe(name: str) -> Path | None:
    """Returns the file of the recipe that `what` names, or None if `what` names a method."""
    from shoal.experiment.recipe import RECIPES
    from shoal.methods import METHODS, is_method

    if is_method(name) and not name.endswith(".toml"):
        return None
    path = RECIPES.find(name)
    if path is None:
        near = did_you_mean(name.removesuffix(".toml"), [*METHODS, *RECIPES.files()])
        hint = near or "; `shoal methods` and `shoal recipes` list what there is"
        raise UserError(f"{name!r} is not a method, not a recipe file, and not a packaged recipe{hint}")
    return path


def expand_run_folders(names: list[str], methods: Collection[str] = ()) -> list[str]:
    """A folder of runs, such as a grid's, stands for its runs; pages that lie beside runs are passed over."""
    from shoal.store.reader import find_run_folders

    names_without_pages = [w for w in names if w in methods or not (w.endswith(".html") and Path(w).is_file())] or names
    inside = {w: [] if w in methods else [str(run) for run in find_run_folders(Path(w))] for w in names_without_pages}
    return [name for w in names_without_pages for name in inside[w] or [w]]


def default_run_path(job: Any, recipe_name: str = "composed", taken_paths: Collection[Path] = ()) -> Path:
    """A composition is called as its recipe is: its pieces would be a long name."""
    method = recipe_name if "=" in job.method else job.method
    return free_path(f"{method}-{Path(job.data).stem}-seed{job.seed}".replace(":", ""), taken_paths=taken_paths)


@contextmanager
def show_progress(job: Any, path: Path, title: str = "") -> Iterator[dict[str, Any]]:
    """Shows how a run goes: yields the functions that `run_job` and `resume_run` call."""
    from shoal.cli.progress import DownloadProgress, RunProgress

    with DownloadProgress(err) as download, RunProgress(err, title or job.method, job.rounds) as progress:
        yield {
            "on_setup": announce_on_setup(path),
            "on_round": progress.on_round,
            "on_end": progress.on_end,
            "progress": download,
        }


def run_jobs(jobs: Mapping[str, tuple[Path, Any]]) -> int:
    """Runs what is not finished, one job after the other. A job that fails leaves a record, and the others run.

    Returns the number of jobs that failed.
    """
    from shoal.experiment.run import run_or_resume
    from shoal.store.failure import record_exceptions

    failed: list[str] = []
    for number, (label, (path, job)) in enumerate(jobs.items(), start=1):
        title = f"[{number}/{len(jobs)}] {label}"
        if (path / "result.json").exists():
            err.print(f"{escape_markup(title)} is finished", highlight=False)
            continue

        def say(reason: str, title: str = title) -> None:
            failed.append(title)
            err.print(f"{title} failed: {reason}", highlight=False, markup=False, soft_wrap=True)

        with record_exceptions(path, job.model_dump(mode="json"), say), show_progress(job, path, title) as watch:
            run_or_resume(job, path, **watch)
    return len(failed)


def announce_on_setup(path: Path) -> Callable[[Any], None]:
    """Says what is run and where, once nothing about it can be refused any more."""

    def tell(experiment: Any) -> None:
        started_runs.append(path)
        err.print(f"run directory: {path}", highlight=False, soft_wrap=True)
        announce_run(experiment)

    return tell


def _edges_text(experiment: Any) -> str:
    kind, _, number = (experiment.job.edges or "place").partition(":")
    count = int(number or len(set((experiment.federation.edges or {}).values())))
    shared = (
        f" that share a cohort of {experiment.cohort}, one client each at least"
        if experiment.cohort is not None
        else ""
    )
    edges = "1 edge" if count == 1 else f"{count} edges by {kind}"
    return f"{edges}{shared}, a meeting every {experiment.job.cloud_every_rounds} rounds"


def announce_run(experiment: Any) -> None:
    job = experiment.job
    note = f" ({experiment.federation.note})" if experiment.federation.note else ""
    cohort = f"{experiment.cohort} per round, " if experiment.cohort is not None else ""
    cohort = f"{_edges_text(experiment)}, " if job.cloud_every_rounds else cohort
    cohort = f"{job.unseen} of them held out, {cohort}" if job.unseen else cohort
    err.print(
        f"{job.method} on {job.data}{note}: {job.clients} clients by {job.partition}, {cohort}"
        f"{job.model} with {experiment.model.parameters:,} parameters, {job.fleet} fleet, seed {job.seed}",
        highlight=False,
        soft_wrap=True,
    )


def read_runs(paths: Iterable[Path], **reading: Any) -> list[Any]:
    from shoal.store.reader import read_run

    return [read_run(path, allow_not_started=True, **reading) for path in paths]


def print_run_table(records: list[Any]) -> None:
    from shoal.report import compare_table, result_table

    out.print(result_table(records) if len(records) == 1 else compare_table(records))


def run_grid(recipe: Any, folder: Path, as_json: bool, force: bool = False) -> None:
    """All jobs of a recipe, each in its own run directory; what is finished is not run again."""
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
        validate_paper(recipe.paper, [planned_run(place, job.model_dump()) for place, job in jobs.values()], METHODS)
    with hint_only_table(len({job.method for job in recipe.jobs.values()})):
        for place, job in jobs.values():  # better now than after hours
            if has_begun := (place / "config.json").exists():
                check_same_job(place, job)
            if not (place / "result.json").exists():
                validate_job(job, None if has_begun else place)
    failed = run_jobs(jobs)
    records = read_runs(place for place, _ in jobs.values())
    paper = None
    if recipe.paper is not None:
        paper = compare_with_paper(records, recipe.paper)
        records = [replace(record, judged=paper.accuracy_key, counted=paper.joules_scope) for record in records]
    write_page(records, page, recipe.title, paper=paper, force=force)
    if as_json:
        beside = {"paper": paper.to_json()} if paper is not None else {}
        print_json({"title": recipe.title, "runs": summarise(records), **beside, "report": str(page)})
    else:
        out.print(f"[bold]{escape_markup(recipe.title)}")
        print_run_table(records)
        if paper is not None:
            out.print(paper_view(paper))
        out.print(f"report: {page}", highlight=False, soft_wrap=True)
    end_with_failures(failed, len(jobs), "; the same command runs them again")


def finish_comparison(records: list[Any], page: Path, as_json: bool, request: Any = None, force: bool = False) -> None:
    """Writes the page and prints the tables."""
    from shoal.report import Comparison, ComparisonRequest, report_table_view, summarise, write_page

    asked = request or ComparisonRequest()
    answers = Comparison(records, asked)
    write_page(records, page, request=asked, force=force)
    if as_json:
        print_json({"runs": summarise(records), **answers.to_json(), "report": str(page)})
        return
    print_run_table(records)
    for sheet in answers.tables():
        out.print(report_table_view(sheet))
    out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)


@contextmanager
def hint_only_table(num_methods: int) -> Iterator[None]:
    """Where several methods are run with the same options, one that only some take is better off in a recipe."""
    try:
        yield
    except UnusedOption as error:
        if num_methods == 1:
            raise
        raise UserError(f"{error}; what only one METHOD takes goes under [only.METHOD] of a recipe") from None
