"""The command `shoal study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.base import AsJson, Force, app, end_with_failures, err, hint_repeat_command, out, print_json, user_errors


@app.command()
def study(
    name: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="Run this study, and judge its claims. A study is a TOML file, or a name from `shoal recipes`.",
        ),
    ],
    budget: Annotated[
        str, typer.Option(help="Run the study with this budget, which sets its cells, variants and seeds.")
    ] = "quick",
    out_path: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the runs and tables into this directory.", show_default="runs/NAME-BUDGET"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Run this many jobs at the same time.", show_default="one per core")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing, and write the tables of the runs that are finished.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Run every unfinished run of a study, and judge its claims. The same command continues a stopped study."""
    with user_errors(as_json):
        from shoal.study.plan import find_study, load_study
        from shoal.study.tables import check_output_files

        path = find_study(name)
        plan, folder = load_study(path), out_path or Path("runs") / f"{path.stem}-{budget}"
        entries = plan.entries(budget)
        check_output_files(folder, force)  # now, because the runs may take hours
        if not report_only:
            with hint_repeat_command(f"shoal study {name} --budget {budget} --out {folder}"):
                _run_study(entries, folder, plan.num_inputs, workers)
        from shoal.report import report_table_view
        from shoal.study.measurements import StudyRuns
        from shoal.study.tables import StudyReport, write_study_tables

        report = StudyReport(StudyRuns(plan, entries, folder), budget)
        files = write_study_tables(report, folder, force)
        if as_json:
            print_json(report.to_json() | {"files": [str(f) for f in files]})
        else:
            if report.claims:
                out.print(report_table_view(report.claims_table()))
            out.print("tables: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
        if not report_only:
            end_with_failures(len(report.runs.failures), len(entries), " The same command runs them again.")


def _run_study(entries: list[Any], folder: Path, num_inputs: tuple[int, ...], workers: int | None) -> None:
    from shoal.experiment.assemble import validate_job
    from shoal.fleet.pool import count_cores
    from shoal.report.summary import duration_text
    from shoal.study.runner import StudyProgress, run_entries

    first_entries = {(e.cell, e.variant): e for e in reversed(entries)}
    for entry in first_entries.values():
        validate_job(entry.job)  # now, because the runs may take hours

    def print_progress(progress: StudyProgress) -> None:
        err.print(
            f"{progress.done_fraction:.0%} done ({progress.num_done} of {progress.num_total}), about "
            f"{duration_text(progress.remaining_s)} left: {progress.entry.label} "
            + (f"failed: {progress.failure}" if progress.failure else f"took {duration_text(progress.duration_s)}"),
            highlight=False,
            soft_wrap=True,
            markup=False,
        )

    run_entries(entries, folder, num_inputs, workers or count_cores(), print_progress)
