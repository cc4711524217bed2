"""The tables of a study: verdicts, the metrics of every cell, and our variant compared with each other variant."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.report.cost_curves import Spread, spread_over_seeds
from shoal.report.html import PAGE, write_tables
from shoal.report.summary import joules_text
from shoal.report.table import ReportTable, best_cells, spread_text
from shoal.store.atomic_files import json_bytes
from shoal.store.outputs import OutputKind, begins_with, check_output, write_output
from shoal.study.measurements import Interval, StudyRun, StudyRuns
from shoal.study.plan import ClaimTest
from shoal.study.tuning_report import tuning_choice, tuning_table
from shoal.study.verdicts import ClaimResult, Outcome, judge_claim

GENERATOR = f"shoal {__version__}"


def _is_own_json(path: Path) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and str(content.get("generator", "")).startswith("shoal ")


MARKDOWN = OutputKind("the tables of a study in Markdown", ".md", begins_with("<!-- Written by shoal "))
JSON = OutputKind("the numbers of a study in JSON", ".json", _is_own_json)
FILES = {"study.md": MARKDOWN, "study.json": JSON, "study.html": PAGE}

COMPARED_METRICS = {"local": "local", "worst10": "worst 10 %", "central": "central", "unseen": "unseen"}


COST_NOTE = (
    "Client-epochs count only the training of the shared model. The joules also include personal models and experts. "
    "The costs to a target are given only for variants that are evaluated in the same rounds as their cell."
)


def percent_text(x: float) -> str:
    """Returns an accuracy in percent with one decimal."""
    return f"{x:.1f}"


def count_text(x: float) -> str:
    """Returns a count with separators for thousands."""
    return f"{x:,.0f}"


class StudyReport:
    """The verdicts and tables of the runs of one budget."""

    def __init__(self, runs: StudyRuns, budget: str) -> None:
        self.runs, self.study, self.budget = runs, runs.study, budget
        self.claims = [judge_claim(claim, runs) for claim in self.study.claims]

    @property
    def heading(self) -> str:
        """The title of the study and its budget."""
        return f"{self.study.title}: {self.budget}"

    @property
    def progress_sentence(self) -> str:
        """How many runs are finished and how many failed."""
        total, missing, failed = len(self.runs.entries), len(self.runs.missing), len(self.runs.failures)
        return f"{total - missing} of {total} runs are finished." + (f" {failed} failed." if failed else "")

    def tables(self) -> list[ReportTable]:
        """Returns all tables, the claims first."""
        cells, tuning = self.runs.cells, tuning_table(self.runs)
        return [
            *([self.claims_table()] if self.claims else []),
            *map(self._cell_table, cells),
            *(self._differences_table(cell) for cell in cells if self.study.our_variant in self.runs.variants(cell)),
            *([tuning] if tuning.rows else []),
            *([self._tests_table()] if self.claims else []),
            *([self._failures_table()] if self.runs.failures else []),
        ]

    def claims_table(self) -> ReportTable:
        """Returns the table of the claims and their verdicts."""
        rows = [
            (str(number), result.verdict, _verdict_counts(result), result.claim.statement)
            for number, result in enumerate(self.claims, start=1)
        ]
        return ReportTable("Claims", ("", "verdict", "tests", "claim"), tuple(rows), notes=(self.progress_sentence,))

    def _failures_table(self) -> ReportTable:
        rows = [
            (f"{cell}, {variant}, seed {seed}", reason) for (cell, variant, seed), reason in self.runs.failures.items()
        ]
        return ReportTable("Failed runs", ("", "reason"), tuple(rows), notes=("The same command runs them again.",))

    def _tests_table(self) -> ReportTable:
        rows = [
            (str(number), _test_text(o.test), o.cell, _interval_text(o.interval), _basis_text(o), o.verdict)
            for number, result in enumerate(self.claims, start=1)
            for o in result.outcomes
        ]
        headers = ("Claim", "test", "cell", "value", "basis", "verdict")
        return ReportTable("All tests of the claims", headers, tuple(rows))

    def _columns(self, cell: str) -> list[tuple[str, str, Callable[[float], str]]]:
        """Returns header, metric and text format of every column of a cell's table."""
        unseen = [("unseen clients, without inputs", "unseen.none")]
        unseen += [(f"with {n} inputs", f"unseen.{n}") for n in self.study.num_inputs]
        unseen += [("with true labels", "unseen.true")]
        accuracies = [(COMPARED_METRICS[name], name) for name in ("local", "worst10", "central")]
        target = self.runs.target_accuracy(cell)
        cost: list[tuple[str, str, Callable[[float], str]]] = (
            []
            if target is None
            else [
                (f"client-epochs to {100 * target:g} %", "epochs_to_target", count_text),
                ("joules to it", "joules_to_target", joules_text),
            ]
        )
        return [(header, metric, percent_text) for header, metric in accuracies + unseen] + cost

    def _cell_table(self, cell: str) -> ReportTable:
        columns, variants, cost = (
            self._columns(cell),
            self.runs.variants(cell),
            self.runs.target_accuracy(cell) is not None,
        )
        table = [[self._spread(cell, variant, metric) for _, metric, _ in columns] for variant in variants]
        rows = [
            (variant, *(spread_text(x, show) for x, (_, _, show) in zip(line, columns, strict=True)))
            for variant, line in zip(variants, table, strict=True)
        ]
        best = best_cells([[line[i] for line in table] for i in range(3)], max)
        return ReportTable(
            f"{cell}: accuracy in %",
            ("", *(header for header, _, _ in columns)),
            tuple(rows),
            best,
            (
                "Mean ± sample standard deviation over seeds. A dash means not measured, or never reached.",
                *([COST_NOTE] if cost else []),
            ),
        )

    def _spread(self, cell: str, variant: str, metric: str) -> Spread | None:
        return spread_over_seeds([run.metric(metric) for run in self.runs.of_variant(cell, variant)])

    def _differences_table(self, cell: str) -> ReportTable:
        ours = self.study.our_variant
        others = [v for v in self.runs.variants(cell) if v != ours]
        rows = []
        for other in others:
            intervals = [self.runs.difference(cell, ours, other, metric) for metric in COMPARED_METRICS]
            bases = dict.fromkeys(interval.basis for interval in intervals if interval is not None)
            rows.append((other, *map(_interval_text, intervals), "; ".join(bases)))
        return ReportTable(
            f"{cell}: {ours} minus each other variant, in points",
            ("variant", *COMPARED_METRICS.values(), "basis"),
            tuple(rows),
            notes=("The 95 % confidence interval is in brackets. A dash means not measured.",),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the content of study.json."""
        return {
            "title": self.study.title,
            "budget": self.budget,
            "fixed_beforehand": self.study.fixed_beforehand,
            "missing": [e.label for e in self.runs.missing],
            "failed": [
                {"cell": cell, "variant": variant, "seed": seed, "reason": reason}
                for (cell, variant, seed), reason in self.runs.failures.items()
            ],
            "runs": [
                {"cell": cell, "variant": variant, "seed": seed, "metrics": _known_metrics(run), **_tuning_facts(run)}
                for (cell, variant, seed), run in self.runs.run_by_key.items()
                if run is not None
            ],
            "differences": [
                {
                    "cell": cell,
                    "baseline": other,
                    "metric": metric,
                    "interval": None if interval is None else asdict(interval),
                }
                for cell in self.runs.cells
                for other in self.runs.variants(cell)
                if other != self.study.our_variant
                for metric in COMPARED_METRICS
                for interval in [self.runs.difference(cell, self.study.our_variant, other, metric)]
            ],
            "claims": [
                {
                    "statement": result.claim.statement,
                    "verdict": result.verdict,
                    "tests": [
                        {
                            "test": o.test.model_dump(exclude={"cells"}, exclude_none=True),
                            "cell": o.cell,
                            "interval": None if o.interval is None else asdict(o.interval),
                            "num_unknown": o.num_unknown,
                            "verdict": o.verdict,
                        }
                        for o in result.outcomes
                    ],
                }
                for result in self.claims
            ],
        }


def check_output_files(out: Path, force: bool = False) -> None:
    """Refuses a folder in which files that shoal did not write have the names of the tables."""
    for name, kind in FILES.items():
        check_output(out / name, kind, force)


def write_study_tables(report: StudyReport, out: Path, force: bool = False) -> list[Path]:
    """Writes the tables as Markdown, JSON and HTML, and returns the files."""
    tables = report.tables()
    fixed = [f"Fixed beforehand. {report.study.fixed_beforehand.strip()}"] if report.study.fixed_beforehand else []
    text = [f"<!-- Written by {GENERATOR}. -->", f"# {report.heading}", *fixed, report.progress_sentence]
    markdown, data, page = (out / name for name in FILES)
    check_output_files(out, force)  # all files, before the first is written
    write_output(markdown, ("\n\n".join([*text, *map(_markdown_table, tables)]) + "\n").encode(), MARKDOWN, force)
    write_output(data, json_bytes({"generator": GENERATOR} | report.to_json()), JSON, force)
    return [markdown, data, write_tables(tables, page, report.heading, force)]


def _markdown_table(table: ReportTable) -> str:
    def cell(i: int, j: int, text: str) -> str:
        joined = " ".join(text.split("\n")).replace("|", r"\|")
        return f"**{joined}**" if (i, j) in table.best_cells else joined

    lines = [f"| {' | '.join(table.headers)} |", f"|{'---|' * len(table.headers)}"]
    lines += [f"| {' | '.join(cell(i, j, x) for j, x in enumerate(row))} |" for i, row in enumerate(table.rows)]
    return "\n\n".join([f"## {table.title}", "\n".join(lines), *table.notes])


def _known_metrics(run: StudyRun) -> dict[str, float]:
    names = ("local", "worst10", "central", "epochs_to_target", "joules_to_target", "clusters_ari", "has_split")
    metrics = {name: run.metric(name) for name in (*names, *(f"unseen.{how}" for how in run.unseen_results))}
    return {name: x for name, x in metrics.items() if x is not None}


def _tuning_facts(run: StudyRun) -> dict[str, Any]:
    choice = tuning_choice(run)
    return {} if choice is None else {"tuned": asdict(choice)}


def _interval_text(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    mean = f"{'at least ' if interval.is_lower_bound else ''}{interval.mean:+.2f}"
    return mean if interval.low is None else f"{mean} [{interval.low:+.2f}, {interval.high:+.2f}]"


def _test_text(test: ClaimTest) -> str:
    limit = f"≥ {test.at_least:g}" if test.at_least is not None else f"≤ {test.at_most:g}"
    limit += f", if {test.requires_positive} is above 0" if test.requires_positive else ""
    match test.kind:
        case "difference":
            return f"{test.metric} of {test.variant} − {test.baseline_metric or test.metric} of {test.baseline} {limit}"
        case "ratio":
            return f"{test.metric} of {test.baseline} / {test.metric} of {test.variant} {limit}"
        case "recovered":
            return (
                f"{test.variant}: fraction of the way from {test.start_metric} to {test.goal_metric} at {test.metric} "
                f"{limit}"
            )
        case "value":
            return f"{test.metric} of {test.variant} {limit}"


def _basis_text(outcome: Outcome) -> str:
    unknown = f"{outcome.num_unknown} runs without this number" if outcome.num_unknown else ""
    return "; ".join(filter(None, (outcome.interval.basis if outcome.interval else "", unknown)))


def _verdict_counts(result: ClaimResult) -> str:
    """Returns how many tests of the claim have which verdict."""
    verdicts = [o.verdict for o in result.outcomes]
    return ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
