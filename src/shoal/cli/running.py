"""How commands play runs, tell of them, and write their pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.base import end_with_failures, err, escaped, going_on, out, print_json
from shoal.errors import UnusedOption, UserError, did_you_mean


def free(name: str, suffix: str = "", taken: Collection[Path] = ()) -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, ... that is not taken."""
    place, n = Path("runs") / f"{name}{suffix}", 1
    while place.exists() or place in taken:
        n += 1
        place = Path("runs") / f"{name}-{n}{suffix}"
    return place


def recipe_named(what: str) -> Path | None:
    """Returns the file of the recipe that `what` names, or None if `what` names a method."""
    from shoal.experiment.recipe import RECIPES
    from shoal.methods import METHODS, is_method

    if is_method(what) and not what.endswith(".toml"):
        return None
    path = RECIPES.find(what)
    if path is None:
        near = did_you_mean(what.removesuffix(".toml"), [*METHODS, *RECIPES.files()])
        hint = near or "; `shoal methods` and `shoal recipes` list what there is"
        raise UserError(f"{what!r} is not a method, not a recipe file, and not a packaged recipe{hint}")
    return path


def expanded(what: list[str], methods: Collection[str] = ()) -> list[str]:
    """A folder of runs, such as a grid's, stands for its runs; pages that lie beside runs are passed over."""
    from shoal.store.reader import find_run_folders

    kept = [w for w in what if w in methods or not (w.endswith(".html") and Path(w).is_file())] or what
    inside = {w: [] if w in methods else [str(run) for run in find_run_folders(Path(w))] for w in kept}
    return [name for w in kept for name in inside[w] or [w]]


def place_of(job: Any, recipe: str = "composed", taken: Collection[Path] = ()) -> Path:
    """A composition is called as its recipe is: its pieces would be a long name."""
    method = recipe if "=" in job.method else job.method
    return free(f"{method}-{Path(job.data).stem}-seed{job.seed}".replace(":", ""), taken=taken)


@contextmanager
def shown(job: Any, place: Path, title: str = "") -> Iterator[dict[str, Any]]:
    """Shows how a run goes: yields the functions that `run_job` and `resume_run` call."""
    from shoal.cli.progress import DownloadProgress, RunProgress

    with DownloadProgress(err) as download, RunProgress(err, title or job.method, job.rounds) as progress:
        yield {
            "on_setup": announcing(place),
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
    for number, (label, (place, job)) in enumerate(jobs.items(), start=1):
        title = f"[{number}/{len(jobs)}] {label}"
        if (place / "result.json").exists():
            err.print(f"{escaped(title)} is finished", highlight=False)
            continue

        def say(reason: str, title: str = title) -> None:
            failed.append(title)
            err.print(f"{title} failed: {reason}", highlight=False, markup=False, soft_wrap=True)

        with record_exceptions(place, job.model_dump(mode="json"), say), shown(job, place, title) as watch:
            run_or_resume(job, place, **watch)
    return len(failed)


def announcing(place: Path) -> Callable[[Any], None]:
    """Says what is run and where, once nothing about it can be refused any more."""

    def tell(bench: Any) -> None:
        going_on.append(place)
        err.print(f"run directory: {place}", highlight=False, soft_wrap=True)
        announce(bench)

    return tell


def _edges(bench: Any) -> str:
    kind, _, number = (bench.job.edges or "place").partition(":")
    count = int(number or len(set((bench.federation.edges or {}).values())))
    shared = f" that share a cohort of {bench.cohort}, one client each at least" if bench.cohort is not None else ""
    edges = "1 edge" if count == 1 else f"{count} edges by {kind}"
    return f"{edges}{shared}, a meeting every {bench.job.cloud_every_rounds} rounds"


def announce(bench: Any) -> None:
    job = bench.job
    note = f" ({bench.federation.note})" if bench.federation.note else ""
    cohort = f"{bench.cohort} per round, " if bench.cohort is not None else ""
    cohort = f"{_edges(bench)}, " if job.cloud_every_rounds else cohort
    cohort = f"{job.unseen} of them held out, {cohort}" if job.unseen else cohort
    err.print(
        f"{job.method} on {job.data}{note}: {job.clients} clients by {job.partition}, {cohort}"
        f"{job.model} with {bench.model.parameters:,} parameters, {job.fleet} fleet, seed {job.seed}",
        highlight=False,
        soft_wrap=True,
    )


def read_runs(paths: Iterable[Path], **reading: Any) -> list[Any]:
    from shoal.store.reader import read_run

    return [read_run(path, allow_not_started=True, **reading) for path in paths]


def show(records: list[Any]) -> None:
    from shoal.report import compare_table, result_table

    out.print(result_table(records) if len(records) == 1 else compare_table(records))


def run_grid(recipe: Any, folder: Path, as_json: bool, force: bool = False) -> None:
    """All jobs of a recipe, each in its own run directory; what is finished is not run again."""
    from shoal.experiment.assemble import check_names
    from shoal.experiment.run import check_same
    from shoal.methods import METHODS
    from shoal.report import PAGE, paper_view, summarise, write_page
    from shoal.reproduce.paper_table import beside_paper, check_paper
    from shoal.store.outputs import check_output
    from shoal.store.reader import planned_run

    page = folder / "report.html"
    check_output(page, PAGE, force)
    jobs = {label: (folder / label, job) for label, job in recipe.jobs.items()}
    if recipe.paper is not None:
        check_paper(recipe.paper, [planned_run(place, job.model_dump()) for place, job in jobs.values()], METHODS)
    with pointing_to_only(len({job.method for job in recipe.jobs.values()})):
        for place, job in jobs.values():  # better now than after hours
            if begun := (place / "config.json").exists():
                check_same(place, job)
            if not (place / "result.json").exists():
                check_names(job, None if begun else place)
    failed = run_jobs(jobs)
    records = read_runs(place for place, _ in jobs.values())
    paper = None
    if recipe.paper is not None:
        paper = beside_paper(records, recipe.paper)
        records = [replace(record, judged=paper.judged, counted=paper.counted) for record in records]
    write_page(records, page, recipe.title, paper=paper, force=force)
    if as_json:
        beside = {"paper": paper.json()} if paper is not None else {}
        print_json({"title": recipe.title, "runs": summarise(records), **beside, "report": str(page)})
    else:
        out.print(f"[bold]{escaped(recipe.title)}")
        show(records)
        if paper is not None:
            out.print(paper_view(paper))
        out.print(f"report: {page}", highlight=False, soft_wrap=True)
    end_with_failures(failed, len(jobs), "; the same command runs them again")


def finish_comparison(
    records: list[Any], page: Path, as_json: bool, questions: Any = None, force: bool = False
) -> None:
    """Writes the page and prints the tables."""
    from shoal.report import Answers, Questions, sheet_view, summarise, write_page

    asked = questions or Questions()
    answers = Answers(records, asked)
    write_page(records, page, questions=asked, force=force)
    if as_json:
        print_json({"runs": summarise(records), **answers.json(), "report": str(page)})
        return
    show(records)
    for sheet in answers.sheets():
        out.print(sheet_view(sheet))
    out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)


@contextmanager
def pointing_to_only(methods: int) -> Iterator[None]:
    """Where several methods are run with the same options, one that only some take is better off in a recipe."""
    try:
        yield
    except UnusedOption as error:
        if methods == 1:
            raise
        raise UserError(f"{error}; what only one METHOD takes goes under [only.METHOD] of a recipe") from None
