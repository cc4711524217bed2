"""A study's tables: claims and verdicts, every cell's figures, and ours against each of the others."""

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
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("generator", "")).startswith("shoal ")


MARKDOWN = OutputKind("the tables of a study in Markdown", ".md", begins_with("<!-- Written by shoal "))
JSON = OutputKind("the numbers of a study in JSON", ".json", _is_own_json)
FILES = {"study.md": MARKDOWN, "study.json": JSON, "study.html": PAGE}

COMPARED_METRICS = {"local": "local", "worst10": "worst 10 %", "central": "central", "unseen": "unseen"}


COST_NOTE = (
    "Client-epochs are of shared training, one model each: what clients train beside it (models of their own, experts) "
    "is in the joules alone. To a target only those are measured that are evaluated in the same rounds as their cell."
)


def percent_text(x: float) -> str:
    return f"{x:.1f}"


def count_text(x: float) -> str:
    return f"{x:,.0f}"


class StudyReport:
    def __init__(self, runs: StudyRuns, budget: str) -> None:
        self.runs, self.study, self.budget = runs, runs.study, budget
        self.claims = [judge_claim(claim, runs) for claim in self.study.claims]

    @property
    def heading(self) -> str:
        return f"{self.study.title}: {self.budget}"

    @property
    def progress_sentence(self) -> str:
        total, missing, failed = len(self.runs.entries), len(self.runs.missing), len(self.runs.failures)
        return f"{total - missing} of {total} runs are finished." + (f" {failed} failed." if failed else "")

    def tables(self) -> list[ReportTable]:
        cells, tuned = self.runs.cells, tuning_table(self.runs)
        return [
            *([self.claims_table()] if self.claims else []),
            *map(self._cell_table, cells),
            *(self._differences_table(cell) for cell in cells if self.study.our_variant in self.runs.variants(cell)),
            *([tuned] if tuned.rows else []),
            *([self._tests_table()] if self.claims else []),
            *([self._failures_table()] if self.runs.failures else []),
        ]

    def claims_table(self) -> ReportTable:
        rows = [(str(n), j.verdict, _verdict_counts(j), j.claim.statement) for n, j in enumerate(self.claims, start=1)]
        return ReportTable("Claims", ("", "verdict", "tests", "claim"), tuple(rows), notes=(self.progress_sentence,))

    def _failures_table(self) -> ReportTable:
        rows = [(f"{cell}, {variant}, seed {seed}", why) for (cell, variant, seed), why in self.runs.failures.items()]
        return ReportTable("Failed runs", ("", "reason"), tuple(rows), notes=("The same command runs them again.",))

    def _tests_table(self) -> ReportTable:
        rows = [
            (str(n), _test_text(o.test), o.cell, _interval_text(o.interval), _basis_text(o), o.verdict)
            for n, j in enumerate(self.claims, start=1)
            for o in j.outcomes
        ]
        heads = ("Claim", "test", "cell", "found", "by", "verdict")
        return ReportTable("Every test of a claim", heads, tuple(rows))

    def _columns(self, cell: str) -> list[tuple[str, str, Callable[[float], str]]]:
        """Head, figure, how it is shown."""
        served = [("unseen, as anybody", "unseen.none")]
        served += [(f"by {n} inputs", f"unseen.{n}") for n in self.study.num_inputs] + [
            ("by true labels", "unseen.true")
        ]
        accuracies = [(COMPARED_METRICS[name], name) for name in ("local", "worst10", "central")]
        target = self.runs.target_accuracy(cell)
        cost: list[tuple[str, str, Callable[[float], str]]] = (
            []
            if target is None
            else [
                (f"client-epochs to {100 * target:g} %", "epochs_to", count_text),
                ("joules to it", "joules_to", joules_text),
            ]
        )
        return [(head, figure, percent_text) for head, figure in accuracies + served] + cost

    def _cell_table(self, cell: str) -> ReportTable:
        columns, variants, cost = (
            self._columns(cell),
            self.runs.variants(cell),
            self.runs.target_accuracy(cell) is not None,
        )
        table = [[self._spread(cell, variant, figure) for _, figure, _ in columns] for variant in variants]
        rows = [
            (variant, *(spread_text(x, show) for x, (_, _, show) in zip(line, columns, strict=True)))
            for variant, line in zip(variants, table, strict=True)
        ]
        best = best_cells([[line[i] for line in table] for i in range(3)], max)
        return ReportTable(
            f"{cell}: accuracy in %",
            ("", *(head for head, _, _ in columns)),
            tuple(rows),
            best,
            (
                "Mean ± sample standard deviation over seeds; –: not measured, or never reached.",
                *([COST_NOTE] if cost else []),
            ),
        )

    def _spread(self, cell: str, variant: str, metric: str) -> Spread | None:
        found = self.runs.of_variant(cell, variant)
        return spread_over_seeds([m.metric(metric) for m in found])

    def _differences_table(self, cell: str) -> ReportTable:
        ours = self.study.our_variant
        others = [v for v in self.runs.variants(cell) if v != ours]
        rows = []
        for other in others:
            found = [self.runs.difference(cell, ours, other, figure) for figure in COMPARED_METRICS]
            how = dict.fromkeys(x.basis for x in found if x is not None)
            rows.append((other, *map(_interval_text, found), "; ".join(how)))
        return ReportTable(
            f"{cell}: what {ours} has more than each, in points",
            ("than", *COMPARED_METRICS.values(), "by"),
            tuple(rows),
            notes=("In brackets: with 95 % confidence. –: no interval, or not measured.",),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.study.title,
            "budget": self.budget,
            "fixed": self.study.fixed_beforehand,
            "missing": [e.label for e in self.runs.missing],
            "failed": [
                {"cell": cell, "variant": variant, "seed": seed, "reason": reason}
                for (cell, variant, seed), reason in self.runs.failures.items()
            ],
            "runs": [
                {"cell": cell, "variant": variant, "seed": seed, "figures": _known_metrics(m), **_tuning_facts(m)}
                for (cell, variant, seed), m in self.runs.run_by_key.items()
                if m is not None
            ],
            "differences": [
                {"cell": cell, "than": other, "figure": figure, "found": None if found is None else asdict(found)}
                for cell in self.runs.cells
                for other in self.runs.variants(cell)
                if other != self.study.our_variant
                for figure in COMPARED_METRICS
                for found in [self.runs.difference(cell, self.study.our_variant, other, figure)]
            ],
            "claims": [
                {
                    "says": j.claim.statement,
                    "verdict": j.verdict,
                    "tests": [
                        {
                            "test": o.test.model_dump(exclude={"cells"}, exclude_none=True),
                            "cell": o.cell,
                            "found": None if o.interval is None else asdict(o.interval),
                            "unknown": o.num_unknown,
                            "verdict": o.verdict,
                        }
                        for o in j.outcomes
                    ],
                }
                for j in self.claims
            ],
        }


def check_output_files(out: Path, force: bool = False) -> None:
    """Refuses a folder with files of somebody else under the names of the tables."""
    for name, kind in FILES.items():
        check_output(out / name, kind, force)


def write_study_tables(report: StudyReport, out: Path, force: bool = False) -> list[Path]:
    sheets = report.tables()
    fixed = [f"Fixed beforehand. {report.study.fixed_beforehand.strip()}"] if report.study.fixed_beforehand else []
    text = [f"<!-- Written by {GENERATOR}. -->", f"# {report.heading}", *fixed, report.progress_sentence]
    markdown, data, page = (out / name for name in FILES)
    check_output_files(out, force)  # all of them before the first is written
    write_output(markdown, ("\n\n".join([*text, *map(_markdown_table, sheets)]) + "\n").encode(), MARKDOWN, force)
    write_output(data, json_bytes({"generator": GENERATOR} | report.to_json()), JSON, force)
    return [markdown, data, write_tables(sheets, page, report.heading, force)]


def _markdown_table(table: ReportTable) -> str:
    def cell(i: int, j: int, text: str) -> str:
        joined = " ".join(text.split("\n")).replace("|", r"\|")
        return f"**{joined}**" if (i, j) in table.best_cells else joined

    lines = [f"| {' | '.join(table.headers)} |", f"|{'---|' * len(table.headers)}"]
    lines += [f"| {' | '.join(cell(i, j, x) for j, x in enumerate(row))} |" for i, row in enumerate(table.rows)]
    return "\n\n".join([f"## {table.title}", "\n".join(lines), *table.notes])


def _known_metrics(run: StudyRun) -> dict[str, float]:
    names = ("local", "worst10", "central", "epochs_to", "joules_to", "ari", "split")
    found = {name: run.metric(name) for name in (*names, *(f"unseen.{how}" for how in run.unseen_results))}
    return {name: x for name, x in found.items() if x is not None}


def _tuning_facts(run: StudyRun) -> dict[str, Any]:
    found = tuning_choice(run)
    return {} if found is None else {"tuned": asdict(found)}


def _interval_text(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    mean = f"{'at least ' if interval.is_lower_bound else ''}{interval.mean:+.2f}"
    return mean if interval.low is None else f"{mean} [{interval.low:+.2f}, {interval.high:+.2f}]"


def _test_text(test: ClaimTest) -> str:
    side = f"≥ {test.at_least:g}" if test.at_least is not None else f"≤ {test.at_most:g}"
    side += f", given {test.requires_positive}" if test.requires_positive else ""
    match test.kind:
        case "difference":
            return f"{test.metric} of {test.variant} − {test.baseline_metric or test.metric} of {test.baseline} {side}"
        case "ratio":
            return f"{test.metric} of {test.baseline} / {test.metric} of {test.variant} {side}"
        case "recovered":
            return f"{test.variant}: share of the way from {test.start_metric} to {test.goal_metric} at {test.metric} {side}"
        case "value":
            return f"{test.metric} of {test.variant} {side}"


def _basis_text(outcome: Outcome) -> str:
    lacking = f"{outcome.num_unknown} played without such a number" if outcome.num_unknown else ""
    return "; ".join(filter(None, (outcome.interval.basis if outcome.interval else "", lacking)))


def _verdict_counts(j: ClaimResult) -> str:
    """How many of its tests went which way."""
    ways = [o.verdict for o in j.outcomes]
    return ", ".join(f"{ways.count(v)} {v}" for v in dict.fromkeys(ways))
