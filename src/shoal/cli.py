"""The command line. Results go to stdout, everything else to stderr; `--json` makes stdout one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import click
import typer
from rich.console import Console
from rich.table import Table

from shoal.errors import UnknownOption, UserError, did_you_mean

app = typer.Typer(
    help="Federated learning for fleets of edge devices whose data differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
data_app = typer.Typer(help="Data sets and how they are divided among clients.", no_args_is_help=True)
app.add_typer(data_app, name="data")

out = Console(width=None if sys.stdout.isatty() else 160)  # a pipe or a log does not wrap
err = Console(stderr=True)
_current: Path | None = None  # the run that is going on, for the word of farewell

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Where to write; a free name under runs/ by default.")]

FLAGS: dict[str, Any] = {
    "data": Annotated[
        str | None,
        typer.Option(help="A set by name (`shoal data list`), or your own .npz, .parquet, .csv or folder."),
    ],
    "partition": Annotated[
        str | None,
        typer.Option(
            help="iid, dirichlet:ALPHA, groups:RHO,ALPHA, labels:0-2/3-9, shards:K, quantity:ALPHA, natural; "
            "shifts may follow: +rotate:0,90 +invert:SHARE +noise:SIGMA +mislabel:SHARE +permute:SHARE "
            "(default dirichlet:0.3; natural with --client-column)."
        ),
    ],
    "clients": Annotated[int | None, typer.Option(help="How many clients (default 20; natural: all).")],
    "rounds": Annotated[int | None, typer.Option(help="Global rounds (default 20).")],
    "cohort": Annotated[
        str | None, typer.Option(help="Clients per round: a number, or a share such as 0.1 (default 0.25).")
    ],
    "epochs": Annotated[int | None, typer.Option(help="Local epochs per round (default 2).")],
    "batch_size": Annotated[int | None, typer.Option(help="Rows per local step (default 32).")],
    "lr": Annotated[float | None, typer.Option(help="Learning rate (default 0.1).")],
    "momentum": Annotated[float | None, typer.Option(help="Momentum of the local SGD (default 0).")],
    "model": Annotated[
        str | None,
        typer.Option(
            help="mlp (default), mlp-dropout, linear, cnn-cifar, cnn-fedavg, resnet18, resnet18-batchnorm, "
            "or your own package.module:Class."
        ),
    ],
    "seed": Annotated[int | None, typer.Option(help="All chance follows from it (default 0).")],
    "fleet": Annotated[
        str | None, typer.Option(help="auto (default), plain, vector, pool, or flower (in this process).")
    ],
    "workers": Annotated[int | None, typer.Option(help="Processes of the pool (default: one per core).")],
    "eval_every": Annotated[int | None, typer.Option(help="Evaluate every N rounds, and after the last (default 1).")],
    "device": Annotated[str | None, typer.Option(help="Where tensors live: cpu (default), cuda, ...")],
    "rows": Annotated[int | None, typer.Option(help="Use a stratified subsample of this many training rows.")],
    "min_size": Annotated[int | None, typer.Option(help="Rows that every client must have (default 10).")],
    "val_share": Annotated[float | None, typer.Option(help="Of each client's rows, for validation (default 0.1).")],
    "test_share": Annotated[float | None, typer.Option(help="Of each client's rows, for testing (default 0.2).")],
    "keep": Annotated[int | None, typer.Option(help="How many checkpoints to keep (default 3).")],
    "devices": Annotated[
        str | None,
        typer.Option(
            help="What clients are, for seconds and joules: pi (default), microcontroller, phone, jetson, server, "
            "or a mix such as pi:0.7,phone:0.3."
        ),
    ],
    "link": Annotated[
        str | None, typer.Option(help="How clients are connected: wifi (default), wifi-slow, lte-m, ethernet.")
    ],
    "radio_w": Annotated[float | None, typer.Option(help="Watts of a radio's electronics while it is on.")],
    "count_idle": Annotated[bool | None, typer.Option(help="Charge clients for waiting until all are done.")],
    "battery": Annotated[float | None, typer.Option(help="Joules of each client; who has used them up leaves.")],
    "budget_joules": Annotated[
        float | None,
        typer.Option(help="Joules of all clients together, without the server's; when they are spent the run ends."),
    ],
    "deadline_s": Annotated[
        float | None, typer.Option(help="Simulated seconds of a stage; a report that takes longer is dropped.")
    ],
    "measure": Annotated[
        str | None, typer.Option(help="codecarbon: also measure what this machine uses (default none).")
    ],
    "country": Annotated[str | None, typer.Option(help="Three letters, such as ESP, for the CO2 of what is measured.")],
    "label_column": Annotated[str | None, typer.Option(help="Column with the label in a table (default: label).")],
    "client_column": Annotated[
        str | None, typer.Option(help="Column that says whose row it is; asks for --partition natural.")
    ],
    "sensitive": Annotated[
        float | None, typer.Option(help="Share of a client's rows that are sensitive (default 0.3), for scmoe.")
    ],
    "sensitive_column": Annotated[str | None, typer.Option(help="Column of 0 and 1 that says which rows these are.")],
    "edges": Annotated[
        str | None,
        typer.Option(
            help="Edge servers between clients and the cloud: how many, such as 5, and who is together: chance:5 (the "
            "default), alike:5 or mixed:5 by labels (default: no edges)."
        ),
    ],
    "edge_column": Annotated[str | None, typer.Option(help="Or the column that names the edge of a row's client.")],
    "cloud_every": Annotated[
        int | None, typer.Option(help="Rounds between two averages of the edges' models in the cloud (default 5).")
    ],
    "long_link": Annotated[
        str | None, typer.Option(help="How edges are connected to the cloud: ethernet (default), wifi, lte-m, ...")
    ],
    "drop_column": Annotated[list[str] | None, typer.Option(help="A column to leave out; may be repeated.")],
    "public": Annotated[
        int | None, typer.Option(help="Rows that no client holds, for the server (default: as the method wants).")
    ],
    "unseen": Annotated[
        str | None,
        typer.Option(
            help="Clients to hold out of training, a number or a share such as 0.2: `shoal evaluate --unseen`."
        ),
    ],
    "set": Annotated[
        list[str] | None, typer.Option(help="An option of a stage, such as train.mu=0.1; may be repeated.")
    ],
}
OF_DATA = (
    *("partition", "clients", "seed", "rows", "min_size", "val_share", "test_share"),
    *("label_column", "client_column", "sensitive", "sensitive_column", "edge_column", "drop_column", "public"),
)


def job_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the job's flags; it receives those that were set as the dict `flags`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in signature(command).parameters.values() if p.name != "flags"]
        added = [Parameter(n, Parameter.KEYWORD_ONLY, default=None, annotation=FLAGS[n]) for n in names]

        @wraps(command)
        def wrapped(**given: Any) -> None:
            flags = {n: given.pop(n) for n in names}
            command(flags={n: v for n, v in flags.items() if v is not None}, **given)

        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own] + added
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return add


@contextmanager
def _told(as_json: bool) -> Iterator[None]:
    """Bad input is one sentence and exit code 2; a stop by the user is 130."""
    try:
        yield
    except UserError as error:
        err.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"error": str(error)}))
        raise typer.Exit(2) from None
    except OSError as error:
        place = f"{error.filename} " if error.filename else "a file "
        sentence = f"{place}cannot be read or written: {error.strerror or error}"
        err.print(f"[bold red]error:[/] {_escaped(sentence)}", highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"error": sentence}))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(f"stopped; `shoal resume {_current or 'RUN'}` goes on from the last complete round", soft_wrap=True)
        raise typer.Exit(130) from None


@contextmanager
def _repeatable(command: str) -> Iterator[None]:
    """A stop of several runs: the command that began them goes on with them."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"stopped; the same command, `{command}` with the same flags, goes on", soft_wrap=True)
        raise typer.Exit(130) from None


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def _overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """The job's keys that were given as flags."""
    from shoal.job import parse_amount, parse_options

    given = dict(flags)
    for key in given.keys() & {"cohort", "unseen"}:
        given[key] = parse_amount(f"--{key}", given[key])
    if "drop_column" in given:
        given["drop_columns"] = tuple(given.pop("drop_column"))
    given["set"] = parse_options(given.pop("set", []))
    return given


def _free(name: str, suffix: str = "") -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, ... that is not taken."""
    place, n = Path("runs") / f"{name}{suffix}", 1
    while place.exists():
        n += 1
        place = Path("runs") / f"{name}-{n}{suffix}"
    return place


def _expanded(what: list[str], methods: Collection[str] = ()) -> list[str]:
    """A folder of runs, such as a grid's, stands for its runs; pages that lie beside runs are passed over."""
    from shoal.store.reader import runs_in

    kept = [w for w in what if w in methods or not (w.endswith(".html") and Path(w).is_file())] or what
    inside = {w: [] if w in methods else [str(run) for run in runs_in(Path(w))] for w in kept}
    return [name for w in kept for name in inside[w] or [w]]


def _place(job: Any) -> Path:
    name = f"{job.method}-{Path(job.data).stem}-seed{job.seed}"
    return _free(name.replace(":", ""))


def _run(job: Any, place: Path, label: str = "") -> dict[str, Any]:
    from shoal import lab
    from shoal.console import DownloadProgress, RunProgress

    title = label or job.method
    with DownloadProgress(err) as download, RunProgress(err, title, job.rounds) as progress:
        result = lab.start(job, place, on_setup=_announcing(place), on_round=progress.on_round, progress=download)
        progress.on_end(result["stopped"])
    return result


def _announcing(place: Path) -> Callable[[Any], None]:
    """Says what is run and where, once nothing about it can be refused any more."""

    def announce(bench: Any) -> None:
        global _current
        _current = place
        err.print(f"run directory: {place}", highlight=False, soft_wrap=True)
        _announce(bench)

    return announce


def _edges(bench: Any) -> str:
    kind, _, number = (bench.job.edges or "place").partition(":")
    count = int(number or len(set((bench.federation.edges or {}).values())))
    shared = f" that share a cohort of {bench.cohort}, one client each at least" if bench.cohort is not None else ""
    edges = "1 edge" if count == 1 else f"{count} edges by {kind}"
    return f"{edges}{shared}, a meeting every {bench.job.cloud_every} rounds"


def _announce(bench: Any) -> None:
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


def _show(paths: list[Path], **reading: Any) -> None:
    from shoal.report import compare_table, result_table
    from shoal.store.reader import read_run

    records = [read_run(p, **reading) for p in paths]
    out.print(result_table(records) if len(records) == 1 else compare_table(records))


def _write_page(
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


def _version(wanted: bool) -> None:
    if wanted:
        from shoal import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    from shoal.console import setup_logging

    setup_logging(err)


@app.command()
@job_flags(*FLAGS)
def run(
    what: Annotated[str, typer.Argument(metavar="METHOD|RECIPE.toml", help="`shoal methods` lists the methods.")],
    flags: dict[str, Any],
    out_path: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run a method, or every job of a recipe, and keep it in a run directory."""
    with _told(as_json):
        from shoal.job import load_recipe, make_job

        if what.endswith(".toml"):
            recipe = load_recipe(Path(what), _overrides(flags))
            if recipe.single is None:
                folder = out_path or Path("runs") / Path(what).stem
                with _repeatable(f"shoal run {what} --out {folder}"):
                    _run_grid(recipe, folder, as_json)
                return
            job = recipe.single
        else:
            job = make_job(_overrides(flags) | {"method": what})
        place = out_path or _place(job)
        result = _run(job, place)
        page = _write_page([place], place / "report.html")
        if as_json:
            _print_json(result | {"report": str(page)})
        else:
            _show([place])
            out.print(f"run:    {place}\nreport: {page}", highlight=False, soft_wrap=True)


def _run_grid(recipe: Any, folder: Path, as_json: bool) -> None:
    """All jobs of a recipe, each in its own run directory; what is finished is not run again."""
    from shoal import lab
    from shoal.bench import check_names
    from shoal.methods import METHODS
    from shoal.report import beside_paper, check_paper, paper_view, summarise
    from shoal.store.reader import planned, read_run

    places = [folder / label for label in recipe.jobs]
    if recipe.paper is not None:
        plans = [planned(p, job.model_dump()) for p, job in zip(places, recipe.jobs.values(), strict=True)]
        check_paper(recipe.paper, plans, METHODS)
    with _pointing_to_only(len({job.method for job in recipe.jobs.values()})):
        for job in recipe.jobs.values():
            check_names(job)  # better now than after hours
    for i, (place, (label, job)) in enumerate(zip(places, recipe.jobs.items(), strict=True)):
        title = f"[{i + 1}/{len(places)}] {label}"
        if (place / "result.json").exists():
            lab.check_same(place, job)
            err.print(f"{_escaped(title)} is finished", highlight=False)
        elif place.exists():
            lab.check_same(place, job)
            _resume(place, title)
        else:
            _run(job, place, title)
    records = [read_run(p) for p in places]
    paper = beside_paper(records, recipe.paper) if recipe.paper is not None else None
    reading: dict[str, Any] = {"judged": paper.judged, "counted": paper.counted} if paper is not None else {}
    records = [read_run(p, **reading) for p in places]
    page = _write_page(places, folder / "report.html", recipe.title, paper=paper, reading=reading)
    if as_json:
        beside = {"paper": paper.json()} if paper is not None else {}
        _print_json({"title": recipe.title, "runs": summarise(records), **beside, "report": str(page)})
    else:
        out.print(f"[bold]{_escaped(recipe.title)}")
        _show(places, **reading)
        if paper is not None:
            out.print(paper_view(paper))
        out.print(f"report: {page}", highlight=False, soft_wrap=True)


def _resume(path: Path, title: str = "") -> dict[str, Any]:
    from shoal import lab
    from shoal.console import DownloadProgress, RunProgress
    from shoal.store.reader import read_run

    config = read_run(path).config
    with (
        DownloadProgress(err) as download,
        RunProgress(err, title or config["method"], config["rounds"]) as progress,
    ):
        result = lab.resume(path, on_setup=_announcing(path), on_round=progress.on_round, progress=download)
        progress.on_end(result["stopped"])
    return result


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], as_json: AsJson = False
) -> None:
    """Go on with a run that was stopped, from its last complete round."""
    with _told(as_json):
        from shoal.store.reader import runs_in

        if found := runs_in(run_dir):
            raise UserError(
                f"{run_dir} is no run but a folder of {len(found)}: if a recipe made it, repeat `shoal run RECIPE.toml "
                f"--out {run_dir}` with the same flags; else resume one of them, such as {found[0]}"
            )
        result = _resume(run_dir)
        page = _write_page([run_dir], run_dir / "report.html")
        if as_json:
            _print_json(result | {"report": str(page)})
        else:
            _show([run_dir])
            out.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run.")],
    unseen: Annotated[
        bool, typer.Option("--unseen", help="On the clients that --unseen held out of training.")
    ] = False,
    assign: Annotated[
        bool,
        typer.Option("--assign", help="With --unseen: each as its rows, without labels, tell: by group, or by prior."),
    ] = False,
    inputs: Annotated[
        int | None, typer.Option("--inputs", help="With --assign: how many of its rows each is judged by (all).")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another way to answer, such as serve.rule=energy; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate what a finished run serves: to its clients, or to those who never trained."""
    with _told(as_json):
        from shoal import evaluation
        from shoal.console import DownloadProgress
        from shoal.job import parse_options
        from shoal.report import evaluation_view

        if assign and not unseen:
            raise UserError("--assign is given without --unseen; it is for clients that never trained")
        if inputs is not None and not assign:
            raise UserError("--inputs is given without --assign; it is for what rows without labels tell")
        chosen = parse_options(options or [])
        with DownloadProgress(err) as progress:
            if unseen:
                found = evaluation.of_unseen(run_dir, assign, progress, inputs, chosen)
            else:
                found = evaluation.of_clients(run_dir, progress, chosen)
        if as_json:
            _print_json(found)
        else:
            out.print(evaluation_view(found))


@app.command()
def study(
    path: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="What is run, and the claims it is to judge.")],
    budget: Annotated[str, typer.Option(help="One of the study's budgets.")] = "quick",
    out_path: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where runs and tables are kept (default: runs/NAME-BUDGET).")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time (default: one per core).")] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing; tables of what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Play every run of a study that is not finished, and judge its claims. Stop it and go on at will."""
    with _told(as_json):
        from shoal.study.plan import load_study

        plan, folder = load_study(path), out_path or Path("runs") / f"{path.stem}-{budget}"
        entries = plan.entries(budget)
        if not report_only:
            with _repeatable(f"shoal study {path} --budget {budget} --out {folder}"):
                _play_study(entries, folder, plan.inputs, workers)
        from shoal.report import sheet_view
        from shoal.study.figures import Runs
        from shoal.study.page import Report, write

        report = Report(Runs(plan, entries, folder), budget)
        files = write(report, folder)
        if as_json:
            _print_json(report.json() | {"files": [str(f) for f in files]})
            return
        out.print(sheet_view(report.claims_sheet()))
        out.print("tables: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)


def _play_study(entries: list[Any], folder: Path, inputs: tuple[int, ...], workers: int | None) -> None:
    from shoal.bench import check_names
    from shoal.fleet.pool import cores
    from shoal.report.summary import duration
    from shoal.study.play import Progress, play

    first = {(e.cell, e.variant): e for e in reversed(entries)}
    for entry in first.values():
        check_names(entry.job)  # better now than after hours

    def tell(now: Progress) -> None:
        err.print(
            f"{now.share:.0%} done ({now.done} of {now.total}), about {duration(now.left_s)} left: {now.entry.label} "
            f"took {duration(now.seconds)}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )

    play(entries, folder, inputs, workers or cores(), tell)


@app.command()
def demo(as_json: AsJson = False) -> None:
    """A minute with shoal: four methods on scikit-learn's digits, offline, and a page that compares them."""
    with _told(as_json):
        from shoal.job import Job

        folder = _free("demo")
        places = []
        for method in ("shoal", "fedavg", "fedavg-ft", "local"):
            places.append(folder / method)
            _run(Job(method=method, rounds=30), places[-1])
        page = _write_page(places, folder / "report.html")
        _finish_comparison(places, page, as_json)


def _finish_comparison(places: list[Path], page: Path, as_json: bool, questions: Any = None, **reading: Any) -> None:
    from shoal.report import Answers, Questions, sheet_view, summarise
    from shoal.store.reader import read_run

    records = [read_run(p, **reading) for p in places]
    answers = Answers(records, questions or Questions())
    if as_json:
        _print_json({"runs": summarise(records), **answers.json(), "report": str(page)})
        return
    _show(places, **reading)
    for sheet in answers.sheets():
        out.print(sheet_view(sheet))
    out.print(f"report: {page.resolve()}", highlight=False, soft_wrap=True)


@contextmanager
def _pointing_to_only(methods: int) -> Iterator[None]:
    """Where several methods are run with the same options, one that only some take is better off in a recipe."""
    try:
        yield
    except UnknownOption as error:
        if methods == 1:
            raise
        raise UserError(f"{error}; what only one METHOD takes goes under [only.METHOD] of a recipe") from None


@app.command()
@job_flags(*FLAGS)
def compare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN|METHOD...", help="Run directories, folders of them (a grid), or methods to run."),
    ],
    flags: dict[str, Any],
    to_accuracy: Annotated[
        str | None,
        typer.Option(help="Joules, simulated time and rounds until these accuracies are held, such as 0.4,0.5."),
    ] = None,
    at_budget: Annotated[
        str | None,
        typer.Option(help="Accuracy held within these joules: percents of the reference (60,80,100), or 500J, 2Wh."),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(help="The reference, a label or a RUN (default: the runs of fedavg, else the first)."),
    ] = None,
    held: Annotated[
        int | None,
        typer.Option(
            help="For how many evaluated rounds in a row (default: a quarter of the shortest run's, 3 to 20)."
        ),
    ] = None,
    accuracy: Annotated[
        str | None,
        typer.Option(
            help="The accuracy that counts: central, or local (mean over clients). Default: central if known."
        ),
    ] = None,
    joules: Annotated[
        str, typer.Option(help="Whose joules count: all, or clients without the server's, which are measured.")
    ] = "all",
    out_path: Annotated[Path | None, typer.Option("--out", "-o", help="The page; a free name by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """One table and one page for several runs. A METHOD is run first, with the flags given."""
    with _told(as_json):
        from shoal.bench import check_names
        from shoal.job import make_job
        from shoal.methods import METHODS, is_method
        from shoal.report import Questions, parse_accuracy, parse_counted
        from shoal.store.reader import read_run

        questions = Questions.parse(to_accuracy, at_budget, of, held)
        reading = {
            "judged": parse_accuracy("--accuracy", accuracy),
            "counted": parse_counted("--joules", joules),
        }
        methods = [m for m in what if not Path(m).is_dir() and is_method(m)]
        what = _expanded(what, methods)
        jobs = {m: make_job(_overrides(flags) | {"method": m}) for m in methods}
        for name in what:
            if name in jobs:
                with _pointing_to_only(len(jobs)):
                    check_names(jobs[name])
            elif Path(name).exists():
                read_run(Path(name))
            else:
                raise UserError(f"{name} is not a run directory, and not a method{did_you_mean(name, METHODS)}")
        if flags and not jobs:
            raise UserError(f"--{next(iter(flags)).replace('_', '-')} is for methods to run, but only runs are given")
        places = []
        for name in what:
            places.append(_place(jobs[name]) if name in jobs else Path(name))
            if name in jobs:
                _run(jobs[name], places[-1])
        page = _write_page(places, out_path or _free("compare", ".html"), questions=questions, reading=reading)
        _finish_comparison(places, page, as_json, questions, **reading)


@app.command()
@job_flags(*FLAGS)
def profile(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="`shoal methods` lists the methods.")],
    flags: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Where the time of a method's rounds goes."""
    with _told(as_json):
        from shoal import lab
        from shoal.console import RunProgress
        from shoal.job import make_job

        job = make_job(_overrides(flags) | {"method": method})
        with RunProgress(err, method, job.rounds) as progress:
            parts = lab.profile(job, on_setup=_announce, on_round=progress.on_round)
        if as_json:
            _print_json({"method": method, "rounds": job.rounds, "parts": parts})
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("part", "seconds", "ms per round", "share"):
            table.add_column(heading, justify="left" if heading == "part" else "right")
        for p in parts:
            table.add_row(p["part"], f"{p['seconds']:.2f}", f"{1e3 * p['per_round_s']:.1f}", f"{p['share']:.1%}")
        out.print(table)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or folders of them (a grid).")],
    out_path: Annotated[Path | None, typer.Option("--out", "-o", help="Default: report.html in the first RUN.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page for one or more runs."""
    with _told(as_json):
        first = next((Path(r) for r in runs if Path(r).is_dir()), Path(runs[0]))
        page = _write_page([Path(r) for r in _expanded(runs)], out_path or first / "report.html")
        if as_json:
            _print_json({"report": str(page)})
        else:
            out.print(str(page), highlight=False, soft_wrap=True)


RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command()
def serve(
    run_dir: RunDir,
    host: Annotated[str, typer.Option(help="Where to listen; others than loopback need --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    tokens: Annotated[Path | None, typer.Option(help="A file of hashed tokens, as `shoal token` writes it.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS: a PEM file with the certificate chain.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS: a PEM file with the private key.")] = None,
    abstain_below: Annotated[
        float, typer.Option(min=0, max=1, help="No label for rows of less confidence, unless a request says otherwise.")
    ] = 0.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows that are answered in one pass.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long the first row of a pass waits for others.")] = 2.0,
    queue: Annotated[int, typer.Option(min=1, help="Rows that may wait; beyond it requests are answered 503.")] = 4096,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second of one token or address; 0: no limit.")] = 200.0,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Megabytes of a request.")] = 8.0,
    poll_s: Annotated[float, typer.Option(min=0.01, help="How often newer checkpoints are looked for.")] = 1.0,
) -> None:
    """Answer predictions over HTTP with a run's newest models, also while it is still training."""
    with _told(False):
        listening, service = _served(run_dir, locals())
        from shoal.serve.server import serve as serve_now

        serve_now(
            service, listening, lambda url: err.print(f"serving {run_dir} on {url}", highlight=False, soft_wrap=True)
        )


def _served(run_dir: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    try:
        from shoal.serve.app import Service
        from shoal.serve.server import Listening
    except ImportError as error:
        raise UserError(
            f"shoal serve needs the extra of that name: pip install -c constraints.txt -e '.[serve]' ({error})"
        ) from None
    from shoal.serve.auth import tokens_from
    from shoal.serve.batching import Batching
    from shoal.serve.gate import Limits

    o = options
    batching = Batching(o["max_batch"], o["max_wait_ms"] / 1000, o["queue"])
    limits = Limits(body_bytes=int(o["max_body_mb"] * 2**20), per_s=o["rate"])
    listening = Listening(o["host"], o["port"], tokens_from(o["tokens"]), o["certificate"], o["key"], limits)
    return listening, Service(run_dir, batching, o["abstain_below"], o["poll_s"])


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose token it is: it is counted and limited under this name.")],
    file: Annotated[Path, typer.Option(help="Where its hash is added; give it to shoal serve --tokens.")] = Path(
        "tokens.txt"
    ),
    as_json: AsJson = False,
) -> None:
    """Make a token for `shoal serve`. It is shown this once: only its hash is kept."""
    with _told(as_json):
        from shoal.serve.auth import new_token

        made = new_token(name, file)
        if as_json:
            _print_json({"name": name, "token": made, "file": str(file)})
        else:
            err.print(f"its hash is in {file}; this is the token, shown only now:", highlight=False, soft_wrap=True)
            print(made)


@app.command()
def export(
    run_dir: RunDir,
    format: Annotated[str, typer.Option(help="onnx, torchscript or safetensors.")] = "onnx",
    cluster: Annotated[
        str | None,
        typer.Option(
            help="One cluster's model, by number or name; default: what a client that never trained is served."
        ),
    ] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: in the run directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, and check that the file gives the same answers."""
    with _told(as_json):
        from dataclasses import asdict

        from shoal.serve.export import export as write

        made = write(run_dir, format, out_path, cluster)
        told = list(made.notes)
        if made.accuracy is not None:
            told.append(f"accuracy of the exported model on the central test set: {made.accuracy:.1%}")
        for note in told:
            err.print(note, highlight=False, soft_wrap=True, markup=False)
        if as_json:
            _print_json(asdict(made) | {"path": str(made.path)})
        else:
            rows = "any number of rows" if made.any_rows else "one row at a time"
            out.print(
                f"{made.path}: {made.name} of round {made.round} for {rows}, {made.bytes:,} bytes; "
                f"its answers differ from the model's by {made.difference:.1e} at most",
                highlight=False,
                soft_wrap=True,
            )


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method's options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one."""
    with _told(as_json):
        from shoal.methods import METHODS, options, summary

        chosen = [name] if name else list(METHODS)
        facts = [{"name": m, "summary": summary(m), "options": options(m)} for m in chosen]
        if as_json:
            _print_json({"methods": facts})
            return
        table = Table(show_header=True, box=None, pad_edge=False)
        for heading in ("option", "default") if name else ("method", "what it is"):
            table.add_column(heading)
        if name:
            out.print(facts[0]["summary"], highlight=False)
            for piece, keys in options(name).items():
                for key, default in keys.items():
                    table.add_row(f"--set {piece}.{key}=", str(default))
        else:
            for fact in facts:
                table.add_row(str(fact["name"]), str(fact["summary"]))
        out.print(table)


@app.command()
def pieces(as_json: AsJson = False) -> None:
    """List what can stand at each step of a method that is composed in a recipe."""
    with _told(as_json):
        from shoal.methods.pieces import PIECES

        known = {step: {name: piece.facts() for name, piece in found.items()} for step, found in PIECES.items()}
        if as_json:
            _print_json({"pieces": known})
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("step", "piece", "from", "goes with"):
            table.add_column(heading, no_wrap=heading in ("step", "piece"), overflow="fold")
        for step, found in known.items():
            for i, (name, facts) in enumerate(found.items()):
                fits = "; ".join(f"{k}: {', '.join(v)}" for k, v in facts["needs"].items())
                table.add_row("" if i else step, name, facts["source"], fits)
        out.print(table)


@app.command()
@job_flags(*FLAGS)
def explain(
    what: Annotated[str, typer.Argument(metavar="METHOD|RECIPE.toml", help="A method, its pieces, or a recipe.")],
    flags: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Say what a method does, step by step: what clients send and learn, what the server learns, what a round costs."""
    with _told(as_json):
        from shoal.bench import check_names, setup
        from shoal.console import DownloadProgress, RunProgress
        from shoal.explain import ROUNDS, explained
        from shoal.job import load_recipe, make_job
        from shoal.report.steps import steps_view

        if what.endswith(".toml"):
            jobs = list(load_recipe(Path(what), _overrides(flags)).jobs.values())
        else:
            jobs = [make_job(_overrides(flags) | {"method": what})]
        first = {job.method: job for job in reversed(jobs)}
        found = []
        for job in (first[name] for name in dict.fromkeys(job.method for job in jobs)):
            check_names(job)
            with DownloadProgress(err) as download, RunProgress(err, f"playing {job.method}", ROUNDS + 1) as progress:
                found.append(explained(setup(job, download), on_round=progress.on_round))
        if as_json:
            _print_json({"methods": found})
            return
        for facts in found:
            out.print(steps_view(facts))


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """The data sets known by name, and where each is found."""
    with _told(as_json):
        from dataclasses import asdict

        from shoal.data.sources import available

        sets = available()
        if as_json:
            _print_json({"data": [asdict(s) for s in sets]})
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "train", "test", "classes", "shape", "where"):
            table.add_column(heading, no_wrap=heading == "name", overflow="fold")
        for s in sets:
            rows = [f"{n:,}" for n in s.rows] if s.rows else ["as asked"] * 2
            table.add_row(s.name, *rows, str(s.classes), " x ".join(map(str, s.shape)), s.where)
        out.print(table)
        out.print("Licences and homes: shoal data list --json", highlight=False)


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="A data set by name.")], as_json: AsJson = False) -> None:
    """Download a data set into the cache (with a checksum), unless it is already there."""
    with _told(as_json):
        from shoal.console import DownloadProgress
        from shoal.data.sources import get

        with DownloadProgress(err) as progress:
            folder = get(name, progress=progress)
        if as_json:
            _print_json({"name": name, "folder": str(folder)})
        else:
            out.print(str(folder), highlight=False, soft_wrap=True)


@data_app.command("show")
@job_flags(*OF_DATA)
def data_show(
    flags: dict[str, Any],
    data: Annotated[str, typer.Argument(help="A data set by name, or your own file or folder.")] = "digits",
    out_path: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw it on an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print and draw how a data set is divided: clients by classes, and how much they differ."""
    with _told(as_json):
        from shoal.bench import describe, federation_of
        from shoal.console import DownloadProgress
        from shoal.job import make_job
        from shoal.report import partition_view, write_partition_page

        with DownloadProgress(err) as progress:
            facts = describe(federation_of(make_job(_overrides(flags | {"data": data})), progress))
        page = write_partition_page(facts, out_path) if out_path else None
        if as_json:
            _print_json(facts | {"page": str(page) if page else None})
            return
        out.print(partition_view(facts))
        if page:
            out.print(f"page: {page}", highlight=False, soft_wrap=True)


def main() -> None:
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        err.print(f"[bold red]error:[/] {_escaped(error.format_message())}", highlight=False, soft_wrap=True)
        if "--json" in sys.argv:
            print(json.dumps({"error": error.format_message()}))
        sys.exit(2)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
