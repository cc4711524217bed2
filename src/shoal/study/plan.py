"""What a study runs: cells (data and how they are divided), variants (methods with options) and seeds, by budget."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.errors import UserError, did_you_mean
from shoal.experiment.job import Job
from shoal.experiment.recipe import RECIPES, merge_layers, read_toml

METRICS = ("local", "worst10", "central", "unseen", "epochs_to", "joules_to", "ari", "split")
CELL_ONLY_KEYS = ("play", "target")  # what a cell has beside keys of a job
STRICT = ConfigDict(extra="forbid", frozen=True)


class ClaimTest(BaseModel):
    """A number of every seed of a cell, and where it should lie.

    `difference`: what `of` has more of a figure than `than`. `ratio`: how many times as much `than` has. `recovered`:
    how much of the way from figure `start` to figure `goal` of `of` its `figure` has come. `value`: the figure of `of`.
    """

    model_config = STRICT

    kind: Literal["difference", "ratio", "recovered", "value"]
    cells: tuple[str, ...]
    variant: str
    metric: str
    baseline: str | None = None
    baseline_metric: str | None = None  # as `figure`
    start_metric: str = "unseen.none"
    goal_metric: str = "unseen.true"
    at_least: float | None = None
    at_most: float | None = None
    criterion: Literal["interval", "every"] = "interval"  # by a 95 % interval, or every seed for itself
    requires_positive: str | None = (
        None  # a figure of `of` that must be above 0 with every seed for the test to say anything
    )

    @model_validator(mode="after")
    def _validate(self) -> ClaimTest:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("one of at_least and at_most must be given")
        if self.kind in ("difference", "ratio") and self.baseline is None:
            raise ValueError(f"{self.kind} needs than, the variant to compare with")
        return self

    @property
    def metrics(self) -> dict[str, str]:
        """Key and figure, of those that are read."""
        more = {"start": self.start_metric, "goal": self.goal_metric} if self.kind == "recovered" else {}
        asked = {"figure": self.metric, "than_figure": self.baseline_metric, "given": self.requires_positive}
        return {key: name for key, name in asked.items() if name} | more


class Claim(BaseModel):
    model_config = STRICT

    statement: str
    tests: tuple[ClaimTest, ...] = Field(min_length=1)


class Budget(BaseModel):
    model_config = STRICT

    seeds: tuple[int, ...] = Field(min_length=1)
    cells: dict[str, dict[str, Any]]  # cell -> {"play": variants or lists of them, and what else is as in [cells]}
    job: dict[str, Any] = Field(default_factory=dict)


class Study(BaseModel):
    """A study file. Keys of a job come from [job], the budget, the cell, the budget's cell and the variant: the last
    one that says something wins."""

    model_config = STRICT

    title: str
    fixed_beforehand: str = ""  # what was decided, on what, before the runs that count
    our_variant: str  # the variant that all others are compared with
    sustained_rounds: int = Field(default=1, ge=1)  # evaluated rounds for which a target counts as reached
    num_inputs: tuple[int, ...] = (
        20,
        50,
        200,
    )  # from which unseen clients are judged; the middle one is what tables show
    job: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    variant_lists: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    cells: dict[str, dict[str, Any]]  # keys of a job, and `target`: the central accuracy to be reached
    budgets: dict[str, Budget]
    claims: tuple[Claim, ...] = ()

    @property
    def shown_num_inputs(self) -> int:
        return self.num_inputs[len(self.num_inputs) // 2]

    def budget(self, name: str) -> Budget:
        if name not in self.budgets:
            hint = did_you_mean(name, self.budgets)
            raise UserError(f"budget {name!r} is not in the study{hint} (it has {', '.join(self.budgets)})")
        return self.budgets[name]

    def entries(self, budget: str) -> list[Entry]:
        """All seeds of a cell are far apart: a study that is stopped has all of its first seed first."""
        chosen = self.budget(budget)
        found = []
        for seed in chosen.seeds:
            for cell, asked in chosen.cells.items():
                found += [self._entry(chosen, cell, variant, seed) for variant in self._variants_to_run(asked)]
        return found

    def _variants_to_run(self, cell_keys: Mapping[str, Any]) -> Iterable[str]:
        """Variants, each once: those that are named, and those of the lists that are; all where nothing is said."""
        names = cell_keys.get("play", self.variants)
        return dict.fromkeys(v for name in names for v in self.variant_lists.get(name, (name,)))

    def _entry(self, budget: Budget, cell: str, variant: str, seed: int) -> Entry:
        cell_defaults, asked, own = self.cells[cell], budget.cells[cell], self.variants[variant]
        keys = [{k: v for k, v in table.items() if k not in CELL_ONLY_KEYS} for table in (cell_defaults, asked)]
        layers = (self.job, budget.job, *keys)
        job = merge_layers(*layers, own, {"seed": seed, "variant": variant})
        # Whoever is evaluated less often would seem to reach a target later.
        is_evaluated_alike = job.eval_every == merge_layers(*layers).eval_every
        return Entry(
            cell, variant, seed, job, asked.get("target", cell_defaults.get("target")) if is_evaluated_alike else None
        )


@dataclass(frozen=True)
class Entry:
    cell: str
    variant: str
    seed: int
    job: Job = field(compare=False)  # follows from the others
    target_accuracy: float | None = field(default=None, compare=False)

    @property
    def relative_path(self) -> Path:
        return Path(self.cell) / f"{_slug(self.variant)}-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.cell}, {self.variant}, seed {self.seed}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def packaged_studies() -> dict[str, Path]:
    """Returns the studies that are installed with shoal, by name."""
    return {name: path for name, path in RECIPES.files().items() if name.startswith("study/")}


def find_study(name: str) -> Path:
    """Returns the local study file of this name, or else the packaged study of this name."""
    path = RECIPES.find(name)
    if path is None:
        known = packaged_studies()
        raise UserError(
            f"{name!r} is not a study file, and not a packaged study{did_you_mean(name, known)} "
            f"(known: {', '.join(known)})"
        )
    return path


def load_study(path: Path) -> Study:
    """All that can be refused before anything is run."""
    content = read_toml(path, "study")
    try:
        study = Study(**content)
    except ValidationError as error:
        raise UserError(f"study {path}: {_problem_sentence(error)}") from None
    try:
        _validate_names(study)
    except UserError as error:
        raise UserError(f"study {path}: {error}") from None
    return study


def _problem_sentence(error: ValidationError) -> str:
    """The first thing that is, but all that is missing at once."""
    problems = {".".join(map(str, p["loc"])): p for p in error.errors()}
    if missing := [where for where, p in problems.items() if p["type"] == "missing"]:
        needed = ", ".join(name for name, key in Study.model_fields.items() if key.is_required())
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; a study needs {needed}"
    where, first = next(iter(problems.items()))
    match first["type"]:
        case "value_error":
            return f"{where}: {first['ctx']['error']}"
        case "tuple_type":
            return f"{where} is {first['input']!r}; it must be a list, such as [{first['input']!r}]"
    return f"{where} is {first['input']!r}: {first['msg'].lower()}"


def _validate_names(study: Study) -> None:
    for name, variants in study.variant_lists.items():
        if name in study.variants:
            raise UserError(f"lists.{name} has the name of a variant; play could mean both")
        _require_known(f"lists.{name} has", variants, "variant", study.variants)
    for name, budget in study.budgets.items():
        _require_known(f"budgets.{name}.cells has", budget.cells, "cell", study.cells)
        for cell, asked in budget.cells.items():
            where, play = f"budgets.{name}.cells.{cell}.play", asked.get("play", [])
            if not isinstance(play, list):
                raise UserError(f"{where} is {play!r}; it must be a list of names")
            _require_known(f"{where} has", play, "list or variant", (*study.variant_lists, *study.variants))
    _require_known("ours is", [study.our_variant], "variant", study.variants)
    slugs = [_slug(name) for name in study.variants]
    if twice := {s for s in slugs if slugs.count(s) > 1}:
        raise UserError(f"two variants would be kept in {min(twice)!r}; their names must differ more")
    for number, claim in enumerate(study.claims, start=1):
        for place, test in enumerate(claim.tests, start=1):
            _validate_test(f"claim {number}, test {place}:", test, study)


def _validate_test(where: str, test: ClaimTest, study: Study) -> None:
    _require_known(f"{where} cells has", test.cells, "cell", study.cells)
    _require_known(f"{where} of is", [test.variant], "variant", study.variants)
    _require_known(f"{where} than is", [test.baseline] if test.baseline else [], "variant", study.variants)
    offered = (*METRICS, *(f"unseen.{how}" for how in ("none", "true", *map(str, study.num_inputs))))
    for key, figure in test.metrics.items():
        _require_known(f"{where} {key} is", [figure], "figure", offered)


def _require_known(where: str, names: Iterable[str], kind: str, allowed: Iterable[str]) -> None:
    allowed_names = list(allowed)
    for name in names:
        if name not in allowed_names:
            hint = did_you_mean(name, allowed_names)
            raise UserError(f"{where} {name!r}, which is no {kind}{hint} (known: {', '.join(allowed_names)})")
