"""`shoal study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.base import AsJson, Force, app, end_with_failures, err, out, print_json, repeatable, told


@app.command()
def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="Run this study, and judge its claims. A study is a TOML file, or a name from `shoal recipes`.",
        ),
    ],
    budget: Annotated[str, typer.Option(help="Run the study with this one of its budgets.")] = "quick",
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Keep the runs and tables in this directory.", show_default="runs/NAME-BUDGET"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run this many jobs at the same time.", show_default="one per core")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing, and write the tables of the runs that are there.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Play every run of a study that is not finished, and judge its claims. Stop it and go on at will."""
    with told(as_json):
        from shoal.study.plan import load_study, study_named
        from shoal.study.tables import check_files

        path = study_named(name)
        plan, folder = load_study(path), out_path or Path("runs") / f"{path.stem}-{budget}"
        entries = plan.entries(budget)
        check_files(folder, force)  # better now than after hours
        if not report_only:
            with repeatable(f"shoal study {name} --budget {budget} --out {folder}"):
                _play_study(entries, folder, plan.inputs, workers)
        from shoal.report import sheet_view
        from shoal.study.measurements import Runs
        from shoal.study.tables import Report, write

        report = Report(Runs(plan, entries, folder), budget)
        files = write(report, folder, force)
        if as_json:
            print_json(report.json() | {"files": [str(f) for f in files]})
        else:
            if report.claims:
                out.print(sheet_view(report.claims_sheet()))
            out.print("tables: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
        if not report_only:
            end_with_failures(len(report.runs.failures), len(entries), "; the same command runs them again")


def _play_study(entries: list[Any], folder: Path, inputs: tuple[int, ...], workers: int | None) -> None:
    from shoal.experiment.assemble import check_names
    from shoal.fleet.pool import count_cores
    from shoal.report.summary import duration
    from shoal.study.runner import Progress, play

    first = {(e.cell, e.variant): e for e in reversed(entries)}
    for entry in first.values():
        check_names(entry.job)  # better now than after hours

    def tell(now: Progress) -> None:
        err.print(
            f"{now.share:.0%} done ({now.done} of {now.total}), about {duration(now.left_s)} left: {now.entry.label} "
            + (f"failed: {now.failure}" if now.failure else f"took {duration(now.seconds)}"),
            highlight=False,
            soft_wrap=True,
            markup=False,
        )

    play(entries, folder, inputs, workers or count_cores(), tell)
