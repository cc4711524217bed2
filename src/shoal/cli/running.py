"""How commands play runs, tell of them, and write their pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.cli.base import err, escaped, going_on, out, print_json
from shoal.errors import UnusedOption, UserError


def free(name: str, suffix: str = "") -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, ... that is not taken."""
    place, n = Path("runs") / f"{name}{suffix}", 1
    while place.exists():
        n += 1
        place = Path("runs") / f"{name}-{n}{suffix}"
    return place


def expanded(what: list[str], methods: Collection[str] = ()) -> list[str]:
    """A folder of runs, such as a grid's, stands for its runs; pages that lie beside runs are passed over."""
    from shoal.store.reader import runs_in

    kept = [w for w in what if w in methods or not (w.endswith(".html") and Path(w).is_file())] or what
    inside = {w: [] if w in methods else [str(run) for run in runs_in(Path(w))] for w in kept}
    return [name for w in kept for name in inside[w] or [w]]


def place_of(job: Any, recipe: str = "composed") -> Path:
    """A composition is called as its recipe is: its pieces would be a long name."""
    method = recipe if "=" in job.method else job.method
    return free(f"{method}-{Path(job.data).stem}-seed{job.seed}".replace(":", ""))


def played(job: Any, place: Path, label: str = "") -> dict[str, Any]:
    from shoal.cli.progress import DownloadProgress, RunProgress
    from shoal.experiment.run import run_job

    title = label or job.method
    with DownloadProgress(err) as download, RunProgress(err, title, job.rounds) as progress:
        result = run_job(job, place, on_setup=announcing(place), on_round=progress.on_round, progress=download)
        progress.on_end(result["stopped"])
    return result


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
    return f"{edges}{shared}, a meeting every {bench.job.cloud_every} rounds"


def announce(bench: Any) -> None:
    job = bench.job
    note = f" ({bench.federation.note})" if bench.federation.note else ""
    cohort = f"{bench.cohort} per round, " if bench.cohort is not None else ""
    cohort = f"{_edges(bench)}, " if job.cloud_every else cohort
    cohort = f"{job.unseen} of them held out, {cohort}" if job.unseen else cohort
    err.print(
        f"{job.method} on {job.data}{note}: {job.clients} clients by {job.partition}, {cohort}"
        f"{job.model} with {bench.model.parameters:,} parameters, {job.fleet} fleet, seed {job.seed}",
        highlight=False,
        soft_wrap=True,
    )


def show(paths: list[Path], **reading: Any) -> None:
    from shoal.report import compare_table, result_table
    from shoal.store.reader import read_run

    records = [read_run(p, **reading) for p in paths]
    out.print(result_table(records) if len(records) == 1 else compare_table(records))


def write_page_of(
    paths: list[Path],
    page: Path,
    title: str | None = None,
    *,
    reading: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    from shoal.report import write_page
    from shoal.store.reader import read_run

    return write_page([read_run(p, need_rounds=True, **(reading or {})) for p in paths], page, title, **more)


def run_grid(recipe: Any, folder: Path, as_json: bool, force: bool = False) -> None:
    """All jobs of a recipe, each in its own run directory; what is finished is not run again."""
    from shoal.experiment.assemble import check_names
    from shoal.experiment.run import check_same
    from shoal.methods import METHODS
    from shoal.report import PAGE, paper_view, summarise
    from shoal.reproduce.paper_table import beside_paper, check_paper
    from shoal.store.outputs import check_output
    from shoal.store.reader import planned, read_run

    page = folder / "report.html"
    check_output(page, PAGE, force)
    places = [folder / label for label in recipe.jobs]
    if recipe.paper is not None:
        plans = [planned(p, job.model_dump()) for p, job in zip(places, recipe.jobs.values(), strict=True)]
        check_paper(recipe.paper, plans, METHODS)
    with pointing_to_only(len({job.method for job in recipe.jobs.values()})):
        for place, job in zip(places, recipe.jobs.values(), strict=True):  # better now than after hours
            begun = (place / "config.json").exists()
            check_names(job, None if begun else place)
            if begun:
                check_same(place, job)
    for i, (place, (label, job)) in enumerate(zip(places, recipe.jobs.items(), strict=True)):
        title = f"[{i + 1}/{len(places)}] {label}"
        if (place / "result.json").exists():
            check_same(place, job)
            err.print(f"{escaped(title)} is finished", highlight=False)
        elif (place / "config.json").exists():
            check_same(place, job)
            resumed(place, title, job.workers)
        else:
            played(job, place, title)
    records = [read_run(p) for p in places]
    paper = beside_paper(records, recipe.paper) if recipe.paper is not None else None
    reading: dict[str, Any] = {"judged": paper.judged, "counted": paper.counted} if paper is not None else {}
    records = [read_run(p, **reading) for p in places]
    write_page_of(places, page, recipe.title, paper=paper, reading=reading, force=force)
    if as_json:
        beside = {"paper": paper.json()} if paper is not None else {}
        print_json({"title": recipe.title, "runs": summarise(records), **beside, "report": str(page)})
    else:
        out.print(f"[bold]{escaped(recipe.title)}")
        show(places, **reading)
        if paper is not None:
            out.print(paper_view(paper))
        out.print(f"report: {page}", highlight=False, soft_wrap=True)


def resumed(path: Path, title: str = "", workers: int | None = None) -> dict[str, Any]:
    from shoal.cli.progress import DownloadProgress, RunProgress
    from shoal.experiment.run import resume_run
    from shoal.store.reader import read_run

    config = read_run(path).config
    with (
        DownloadProgress(err) as download,
        RunProgress(err, title or config["method"], config["rounds"]) as progress,
    ):
        result = resume_run(
            path, on_setup=announcing(path), workers=workers, on_round=progress.on_round, progress=download
        )
        progress.on_end(result["stopped"])
    return result


def finish_comparison(places: list[Path], page: Path, as_json: bool, questions: Any = None, **reading: Any) -> None:
    from shoal.report import Answers, Questions, sheet_view, summarise
    from shoal.store.reader import read_run

    records = [read_run(p, **reading) for p in places]
    answers = Answers(records, questions or Questions())
    if as_json:
        print_json({"runs": summarise(records), **answers.json(), "report": str(page)})
        return
    show(places, **reading)
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
