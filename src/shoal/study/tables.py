"""A study's tables: claims and verdicts, every cell's figures, and ours against each of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.report.cost_curves import Spread, over_seeds
from shoal.report.html import PAGE, write_sheets
from shoal.report.summary import joules_text
from shoal.report.table import Sheet, best_cells, spread_text
from shoal.store.atomic_files import json_bytes
from shoal.store.outputs import OutputKind, begins_with, check_output, write_output
from shoal.study.measurements import Interval, Measured, Runs
from shoal.study.plan import Check
from shoal.study.tuning_report import chosen, tuning_sheet
from shoal.study.verdicts import Judged, Outcome, judged

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

COMPARED = {"local": "local", "worst10": "worst 10 %", "central": "central", "unseen": "unseen"}


COUNTED = (
    "Client-epochs are of shared training, one model each: what clients train beside it (models of their own, experts) "
    "is in the joules alone. To a target only those are measured that are evaluated in the same rounds as their cell."
)


def percent(x: float) -> str:
    return f"{x:.1f}"


def count(x: float) -> str:
    return f"{x:,.0f}"


class Report:
    def __init__(self, runs: Runs, budget: str) -> None:
        self.runs, self.study, self.budget = runs, runs.study, budget
        self.claims = [judged(claim, runs) for claim in self.study.claims]

    @property
    def heading(self) -> str:
        return f"{self.study.title}: {self.budget}"

    @property
    def done(self) -> str:
        total, missing, failed = len(self.runs.entries), len(self.runs.missing), len(self.runs.failures)
        return f"{total - missing} of {total} runs are finished." + (f" {failed} failed." if failed else "")

    def sheets(self) -> list[Sheet]:
        cells, tuned = self.runs.cells, tuning_sheet(self.runs)
        return [
            *([self.claims_sheet()] if self.claims else []),
            *map(self._cell, cells),
            *(self._against(cell) for cell in cells if self.study.ours in self.runs.variants(cell)),
            *([tuned] if tuned.rows else []),
            *([self._tests()] if self.claims else []),
            *([self._failures()] if self.runs.failures else []),
        ]

    def claims_sheet(self) -> Sheet:
        rows = [(str(n), j.verdict, _counted(j), j.claim.says) for n, j in enumerate(self.claims, start=1)]
        return Sheet("Claims", ("", "verdict", "tests", "claim"), tuple(rows), notes=(self.done,))

    def _failures(self) -> Sheet:
        rows = [(f"{cell}, {variant}, seed {seed}", why) for (cell, variant, seed), why in self.runs.failures.items()]
        return Sheet("Failed runs", ("", "reason"), tuple(rows), notes=("The same command runs them again.",))

    def _tests(self) -> Sheet:
        rows = [
            (str(n), _asked(o.test), o.cell, _interval(o.found), _how(o), o.verdict)
            for n, j in enumerate(self.claims, start=1)
            for o in j.outcomes
        ]
        heads = ("Claim", "test", "cell", "found", "by", "verdict")
        return Sheet("Every test of a claim", heads, tuple(rows))

    def _columns(self, cell: str) -> list[tuple[str, str, Callable[[float], str]]]:
        """Head, figure, how it is shown."""
        served = [("unseen, as anybody", "unseen.none")]
        served += [(f"by {n} inputs", f"unseen.{n}") for n in self.study.inputs] + [("by true labels", "unseen.true")]
        accuracies = [(COMPARED[name], name) for name in ("local", "worst10", "central")]
        target = self.runs.target(cell)
        cost: list[tuple[str, str, Callable[[float], str]]] = (
            []
            if target is None
            else [
                (f"client-epochs to {100 * target:g} %", "epochs_to", count),
                ("joules to it", "joules_to", joules_text),
            ]
        )
        return [(head, figure, percent) for head, figure in accuracies + served] + cost

    def _cell(self, cell: str) -> Sheet:
        columns, variants, cost = self._columns(cell), self.runs.variants(cell), self.runs.target(cell) is not None
        table = [[self._spread(cell, variant, figure) for _, figure, _ in columns] for variant in variants]
        rows = [
            (variant, *(spread_text(x, show) for x, (_, _, show) in zip(line, columns, strict=True)))
            for variant, line in zip(variants, table, strict=True)
        ]
        best = best_cells([[line[i] for line in table] for i in range(3)], max)
        return Sheet(
            f"{cell}: accuracy in %",
            ("", *(head for head, _, _ in columns)),
            tuple(rows),
            best,
            (
                "Mean ± sample standard deviation over seeds; –: not measured, or never reached.",
                *([COUNTED] if cost else []),
            ),
        )

    def _spread(self, cell: str, variant: str, figure: str) -> Spread | None:
        found = self.runs.of(cell, variant)
        return over_seeds([m.figure(figure) for m in found])

    def _against(self, cell: str) -> Sheet:
        ours = self.study.ours
        others = [v for v in self.runs.variants(cell) if v != ours]
        rows = []
        for other in others:
            found = [self.runs.difference(cell, ours, other, figure) for figure in COMPARED]
            how = dict.fromkeys(x.how for x in found if x is not None)
            rows.append((other, *map(_interval, found), "; ".join(how)))
        return Sheet(
            f"{cell}: what {ours} has more than each, in points",
            ("than", *COMPARED.values(), "by"),
            tuple(rows),
            notes=("In brackets: with 95 % confidence. –: no interval, or not measured.",),
        )

    def json(self) -> dict[str, Any]:
        return {
            "title": self.study.title,
            "budget": self.budget,
            "fixed": self.study.fixed,
            "missing": [e.label for e in self.runs.missing],
            "failed": [
                {"cell": cell, "variant": variant, "seed": seed, "reason": reason}
                for (cell, variant, seed), reason in self.runs.failures.items()
            ],
            "runs": [
                {"cell": cell, "variant": variant, "seed": seed, "figures": _known(m), **_tuned(m)}
                for (cell, variant, seed), m in self.runs.found.items()
                if m is not None
            ],
            "differences": [
                {"cell": cell, "than": other, "figure": figure, "found": None if found is None else asdict(found)}
                for cell in self.runs.cells
                for other in self.runs.variants(cell)
                if other != self.study.ours
                for figure in COMPARED
                for found in [self.runs.difference(cell, self.study.ours, other, figure)]
            ],
            "claims": [
                {
                    "says": j.claim.says,
                    "verdict": j.verdict,
                    "tests": [
                        {
                            "test": o.test.model_dump(exclude={"cells"}, exclude_none=True),
                            "cell": o.cell,
                            "found": None if o.found is None else asdict(o.found),
                            "unknown": o.unknown,
                            "verdict": o.verdict,
                        }
                        for o in j.outcomes
                    ],
                }
                for j in self.claims
            ],
        }


def check_files(out: Path, force: bool = False) -> None:
    """Refuses a folder with files of somebody else under the names of the tables."""
    for name, kind in FILES.items():
        check_output(out / name, kind, force)


def write(report: Report, out: Path, force: bool = False) -> list[Path]:
    sheets = report.sheets()
    fixed = [f"Fixed beforehand. {report.study.fixed.strip()}"] if report.study.fixed else []
    text = [f"<!-- Written by {GENERATOR}. -->", f"# {report.heading}", *fixed, report.done]
    markdown, data, page = (out / name for name in FILES)
    check_files(out, force)  # all of them before the first is written
    write_output(markdown, ("\n\n".join([*text, *map(_markdown, sheets)]) + "\n").encode(), MARKDOWN, force)
    write_output(data, json_bytes({"generator": GENERATOR} | report.json()), JSON, force)
    return [markdown, data, write_sheets(sheets, page, report.heading, force)]


def _markdown(sheet: Sheet) -> str:
    def cell(i: int, j: int, text: str) -> str:
        joined = " ".join(text.split("\n")).replace("|", r"\|")
        return f"**{joined}**" if (i, j) in sheet.best else joined

    lines = [f"| {' | '.join(sheet.heads)} |", f"|{'---|' * len(sheet.heads)}"]
    lines += [f"| {' | '.join(cell(i, j, x) for j, x in enumerate(row))} |" for i, row in enumerate(sheet.rows)]
    return "\n\n".join([f"## {sheet.title}", "\n".join(lines), *sheet.notes])


def _known(m: Measured) -> dict[str, float]:
    names = ("local", "worst10", "central", "epochs_to", "joules_to", "ari", "split")
    found = {name: m.figure(name) for name in (*names, *(f"unseen.{how}" for how in m.unseen))}
    return {name: x for name, x in found.items() if x is not None}


def _tuned(m: Measured) -> dict[str, Any]:
    found = chosen(m)
    return {} if found is None else {"tuned": asdict(found)}


def _interval(found: Interval | None) -> str:
    if found is None:
        return "–"
    mean = f"{'at least ' if found.bound else ''}{found.mean:+.2f}"
    return mean if found.low is None else f"{mean} [{found.low:+.2f}, {found.high:+.2f}]"


def _asked(test: Check) -> str:
    side = f"≥ {test.at_least:g}" if test.at_least is not None else f"≤ {test.at_most:g}"
    side += f", given {test.given}" if test.given else ""
    match test.kind:
        case "difference":
            return f"{test.figure} of {test.of} − {test.than_figure or test.figure} of {test.than} {side}"
        case "ratio":
            return f"{test.figure} of {test.than} / {test.figure} of {test.of} {side}"
        case "recovered":
            return f"{test.of}: share of the way from {test.start} to {test.goal} at {test.figure} {side}"
        case "value":
            return f"{test.figure} of {test.of} {side}"


def _how(o: Outcome) -> str:
    lacking = f"{o.unknown} played without such a number" if o.unknown else ""
    return "; ".join(filter(None, (o.found.how if o.found else "", lacking)))


def _counted(j: Judged) -> str:
    """How many of its tests went which way."""
    ways = [o.verdict for o in j.outcomes]
    return ", ".join(f"{ways.count(v)} {v}" for v in dict.fromkeys(ways))
