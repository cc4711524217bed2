"""A recipe: a TOML file with one job or with a grid of jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shoal.errors import UserError, did_you_mean, parse_toml
from shoal.experiment.job import Job, make_job
from shoal.store.packaged import PackagedFiles

RECIPES = PackagedFiles("recipes", ".toml")
MAX_JOBS = 10_000  # of a grid


class Recipe(BaseModel):
    """The jobs of a recipe file.

    The top level of the file has the keys of a job. [grid] has the keys that vary, [only.METHOD] has keys of one
    method, [variants.NAME] has the keys of a row with its own name, and [paper] has the numbers of a paper.
    """

    model_config = ConfigDict(frozen=True)

    title: str
    jobs: dict[str, Job]  # by label; the label is empty if the recipe has one job
    paper: dict[str, Any] | None = None

    @property
    def single_job(self) -> Job | None:
        """The job of a recipe without a grid, else None."""
        return self.jobs.get("")


def read_toml(path: Path, kind: str = "recipe") -> dict[str, Any]:
    """Returns the content of a TOML file. `kind` names the file in errors."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{kind} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{kind} {path} is not valid TOML: {error}") from None


def merge_layers(*layers: Mapping[str, Any]) -> Job:
    """Returns the job of several tables of keys. A later table wins, option by option."""
    flat: dict[str, Any] = {}
    for layer in layers:
        flat |= _flatten(layer)
    return make_job(_unflatten(flat))


def load_recipe(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    """Reads a recipe. `overrides` are the keys that the user gave as flags."""
    content = read_toml(path)
    if "budgets" in content:
        raise UserError(f"recipe {path} is a study. Run it with `shoal study`.")
    title, paper = str(content.pop("title", path.stem)), content.pop("paper", None)
    only = _method_tables(path, content.pop("only", {}))
    variants = _variant_tables(path, content.pop("variants", {}))
    grid, flags = _grid(path, content.pop("grid", {})), _flatten(overrides)
    grid |= {"variant": list(variants)} if variants and "variant" not in grid else {}
    if "method" in content and "method" in grid:
        raise UserError(f"recipe {path}: method is both a key and in the grid. Leave one of them out.")
    keys_in_file = _flatten(content) | grid
    grid = {k: v for k, v in grid.items() if k not in flags}  # a flag fixes what the grid would vary
    if (num_jobs := math.prod(map(len, grid.values()))) > MAX_JOBS:
        raise UserError(f"recipe {path}: the grid has {num_jobs} jobs, but it may have at most {MAX_JOBS}.")
    jobs: dict[str, Job] = {}
    for label, point in _grid_points(grid):
        if label in jobs:
            raise UserError(f"recipe {path}: two points of the grid are called {label!r}. List each value once.")
        variant_keys = _variant_values(path, variants, point.get("variant"))
        values = _flatten(content) | variant_keys | flags | point
        jobs[label] = make_job(_unflatten(only.get(str(values.get("method")), {}) | values))
    return Recipe(title=title + _changed_suffix(flags, keys_in_file, only | variants), jobs=jobs, paper=paper)


def _changed_suffix(
    flags: Mapping[str, Any], keys_in_file: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns a note for the title if flags change keys of the file, because the title describes the file."""
    tables_in_file = [keys_in_file, *tables.values()]
    keys = [
        key for key, value in flags.items() if any(key in values and values[key] != value for values in tables_in_file)
    ]
    return f" (changed: {', '.join(key.removeprefix('set.') for key in keys)})" if keys else ""


def _grid(path: Path, grid: Any) -> dict[str, list[Any]]:
    if not isinstance(grid, dict):
        raise UserError(f"recipe {path}: grid is {grid!r}; it must be a table of lists, such as seed = [0, 1]")
    flat = _flatten(grid)
    for key, values in flat.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"recipe {path}: grid.{key} is {values!r}; it must be a list of values")
    return flat


def _method_tables(path: Path, tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"recipe {path}: [only] is {tables!r}; it must be tables by method, such as [only.simclust]")
    return {method: _flatten(values) for method, values in tables.items()}


def _variant_tables(path: Path, tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"recipe {path}: [variants] is {tables!r}; it must be tables by name, such as [variants.slow]")
    return {name: _flatten(values) for name, values in tables.items()}


def _variant_values(path: Path, variants: Mapping[str, dict[str, Any]], name: str | None) -> dict[str, Any]:
    if name is not None and name not in variants:
        hint = did_you_mean(str(name), variants) or f" (known: {', '.join(variants)})"
        raise UserError(f"recipe {path}: grid.variant has {name!r}, for which there is no [variants] table{hint}")
    return variants[name] if name is not None else {}


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Puts options on one level: {"set": {"train": {"mu": 1}}} becomes {"set.train.mu": 1}. Other keys stay."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key.split(".")[0] == "set" and isinstance(value, Mapping):
            flat |= _flatten({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in flat.items() if not k.startswith("set.")}
    options: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        if path.startswith("set."):
            _, piece, *key = path.split(".")
            if len(key) != 1:
                raise UserError(
                    f"key {path!r} is {value!r}; an option must have the form set.piece.key, such as set.train.mu"
                )
            options.setdefault(piece, {})[key[0]] = value
    return values if "set" in values else values | {"set": options}


def _grid_points(grid: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the label and the keys of every combination.

    A value that is a table sets its keys together: {merge = 0.2, split = 0.3} for set.cluster, or
    {cluster = {algorithm = "kmeans"}} for set.
    """
    for values in itertools.product(*grid.values()):
        point: dict[str, Any] = {}
        for key, value in zip(grid, values, strict=True):
            point |= _flatten({key: value})
        yield "-".join(map(_label_part, values)), point


def _label_part(value: Any) -> str:
    """Returns the text of a value in the name of a run."""
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_label_part(v)}" for k, v in value.items())
    return str(value).replace("/", "_").replace(":", "")
