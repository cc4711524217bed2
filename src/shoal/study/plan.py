"""A study file: its cells, variants, seeds, budgets and claims.

A cell is a data set with a partition, and a variant is a method with options. runner.py runs a study, verdicts.py
judges its claims, and tables.py writes the results.
"""

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

METRICS = ("local", "worst10", "central", "unseen", "epochs_to_target", "joules_to_target", "clusters_ari", "has_split")
CELL_ONLY_KEYS = ("variants", "target_accuracy")  # keys of a cell that are no keys of a job
STRICT = ConfigDict(extra="forbid", frozen=True)


class ClaimTest(BaseModel):
    """A number for every seed of a cell, and a limit for it.

    - `difference`: the metric of `variant` minus `baseline_metric` (or the metric) of `baseline`.
    - `ratio`: the metric of `baseline` divided by the metric of `variant`.
    - `recovered`: the fraction of the way from `start_metric` to `goal_metric` at which the metric of `variant` is.
    - `value`: the metric of `variant`.
    """

    model_config = STRICT

    kind: Literal["difference", "ratio", "recovered", "value"]
    cells: tuple[str, ...]
    variant: str
    metric: str
    baseline: str | None = None
    baseline_metric: str | None = None  # the metric, if None
    start_metric: str = "unseen.none"
    goal_metric: str = "unseen.true"
    at_least: float | None = None
    at_most: float | None = None
    criterion: Literal["interval", "every_seed"] = "interval"  # the 95 % interval, or each seed on its own
    requires_positive: str | None = None  # a seed counts only if this metric of `variant` is above 0

    @model_validator(mode="after")
    def _validate(self) -> ClaimTest:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of at_least and at_most")
        if self.kind in ("difference", "ratio") and self.baseline is None:
            raise ValueError(f"{self.kind} needs baseline, the variant to compare with")
        return self

    @property
    def metrics(self) -> dict[str, str]:
        """The metrics that the test reads, by their key in the study file."""
        more = {"start_metric": self.start_metric, "goal_metric": self.goal_metric} if self.kind == "recovered" else {}
        names = {
            "metric": self.metric,
            "baseline_metric": self.baseline_metric,
            "requires_positive": self.requires_positive,
        }
        return {key: name for key, name in names.items() if name} | more


class Claim(BaseModel):
    """A statement, and the tests that it must pass."""

    model_config = STRICT

    statement: str
    tests: tuple[ClaimTest, ...] = Field(min_length=1)


class Budget(BaseModel):
    """The seeds and cells that `shoal study --budget` runs."""

    model_config = STRICT

    seeds: tuple[int, ...] = Field(min_length=1)
    cells: dict[
        str, dict[str, Any]
    ]  # by name: "variants" (names of variants or of variant lists), and keys as in [cells]
    job: dict[str, Any] = Field(default_factory=dict)


class Study(BaseModel):
    """A study file.

    Keys of a job come from [job], the budget, the cell, the budget's cell and the variant. A later table wins.
    """

    model_config = STRICT

    title: str
    fixed_beforehand: str = ""  # the decisions that were made before the runs, and their reasons
    our_variant: str  # the variant with which all others are compared
    sustained_rounds: int = Field(default=1, ge=1)  # evaluated rounds in a row in which a target must be reached
    num_inputs: tuple[int, ...] = (20, 50, 200)  # inputs of an unseen client; `unseen` is with the middle number
    job: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    variant_lists: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    cells: dict[str, dict[str, Any]]  # keys of a job, and `target_accuracy`: the central accuracy to reach
    budgets: dict[str, Budget]
    claims: tuple[Claim, ...] = ()

    @property
    def shown_num_inputs(self) -> int:
        """The number of inputs with which tables show unseen clients."""
        return self.num_inputs[len(self.num_inputs) // 2]

    def budget(self, name: str) -> Budget:
        """Returns the budget of this name."""
        if name not in self.budgets:
            hint = did_you_mean(name, self.budgets)
            raise UserError(f"budget {name!r} is not in the study{hint} (it has {', '.join(self.budgets)})")
        return self.budgets[name]

    def entries(self, budget: str) -> list[Entry]:
        """Returns the entries of a budget seed by seed, so that a stopped study has a complete first seed."""
        chosen_budget = self.budget(budget)
        entries = []
        for seed in chosen_budget.seeds:
            for cell, cell_keys in chosen_budget.cells.items():
                entries += [self._entry(chosen_budget, cell, v, seed) for v in self._variants_to_run(cell_keys)]
        return entries

    def _variants_to_run(self, cell_keys: Mapping[str, Any]) -> Iterable[str]:
        """Returns the variants of a cell, each once. A cell without the key runs all variants."""
        names = cell_keys.get("variants", self.variants)
        return dict.fromkeys(v for name in names for v in self.variant_lists.get(name, (name,)))

    def _entry(self, budget: Budget, cell: str, variant: str, seed: int) -> Entry:
        cell_defaults, budget_keys, variant_keys = self.cells[cell], budget.cells[cell], self.variants[variant]
        keys = [{k: v for k, v in table.items() if k not in CELL_ONLY_KEYS} for table in (cell_defaults, budget_keys)]
        layers = (self.job, budget.job, *keys)
        job = merge_layers(*layers, variant_keys, {"seed": seed, "variant": variant})
        # A variant that is evaluated less often would seem to reach a target later.
        has_common_schedule = job.eval_every == merge_layers(*layers).eval_every
        target_accuracy = budget_keys.get("target_accuracy", cell_defaults.get("target_accuracy"))
        return Entry(cell, variant, seed, job, target_accuracy if has_common_schedule else None)


@dataclass(frozen=True)
class Entry:
    """One run of a study: a variant in a cell with a seed."""

    cell: str
    variant: str
    seed: int
    job: Job = field(compare=False)  # follows from the other fields
    target_accuracy: float | None = field(default=None, compare=False)

    @property
    def relative_path(self) -> Path:
        """The run directory in the folder of the study."""
        return Path(self.cell) / f"{_slug(self.variant)}-{self.seed}"

    @property
    def label(self) -> str:
        """The name of the run in messages."""
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
        studies = packaged_studies()
        raise UserError(
            f"{name!r} is not a study file, and not a packaged study{did_you_mean(name, studies)} "
            f"(known: {', '.join(studies)})"
        )
    return path


def load_study(path: Path) -> Study:
    """Reads a study file, and refuses what can be seen to be wrong before any run."""
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
    """Returns the first problem, or all missing keys at once."""
    problems = {".".join(map(str, p["loc"])): p for p in error.errors()}
    if missing := [where for where, p in problems.items() if p["type"] == "missing"]:
        required_keys = ", ".join(name for name, key in Study.model_fields.items() if key.is_required())
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; a study needs {required_keys}"
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
            raise UserError(f"variant_lists.{name} has the name of a variant. Give the list another name.")
        _require_known(f"variant_lists.{name} has", variants, "variant", study.variants)
    for name, budget in study.budgets.items():
        _require_known(f"budgets.{name}.cells has", budget.cells, "cell", study.cells)
        for cell, cell_keys in budget.cells.items():
            where, names = f"budgets.{name}.cells.{cell}.variants", cell_keys.get("variants", [])
            if not isinstance(names, list):
                raise UserError(f"{where} is {names!r}; it must be a list of names")
            _require_known(f"{where} has", names, "list or variant", (*study.variant_lists, *study.variants))
    _require_known("our_variant is", [study.our_variant], "variant", study.variants)
    slugs = [_slug(name) for name in study.variants]
    if repeated := {s for s in slugs if slugs.count(s) > 1}:
        raise UserError(f"two variants would have the folder {min(repeated)!r}. Give them names that differ more.")
    for number, claim in enumerate(study.claims, start=1):
        for test_number, test in enumerate(claim.tests, start=1):
            _validate_test(f"claim {number}, test {test_number}:", test, study)


def _validate_test(where: str, test: ClaimTest, study: Study) -> None:
    _require_known(f"{where} cells has", test.cells, "cell", study.cells)
    _require_known(f"{where} variant is", [test.variant], "variant", study.variants)
    _require_known(f"{where} baseline is", [test.baseline] if test.baseline else [], "variant", study.variants)
    metrics = (*METRICS, *(f"unseen.{how}" for how in ("none", "true", *map(str, study.num_inputs))))
    for key, metric in test.metrics.items():
        _require_known(f"{where} {key} is", [metric], "metric", metrics)


def _require_known(where: str, names: Iterable[str], kind: str, allowed: Iterable[str]) -> None:
    allowed_names = list(allowed)
    for name in names:
        if name not in allowed_names:
            hint = did_you_mean(name, allowed_names)
            raise UserError(f"{where} {name!r}, which is no {kind}{hint} (known: {', '.join(allowed_names)})")
