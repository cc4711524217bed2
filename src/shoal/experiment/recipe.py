"""A recipe: a TOML file that stands for one job, or for a grid of them."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shoal.errors import UserError, did_you_mean
from shoal.experiment.job import Job, make_job
from shoal.store.packaged import PackagedFiles

RECIPES = PackagedFiles("recipes", ".toml")


class Recipe(BaseModel):
    """A file that reproduces one table: a job, under [grid] the keys that vary, under [only.METHOD] those of one
    method, under [variants.NAME] those of a row that has a name of its own, and under [paper] the figures it is to be
    read beside."""

    model_config = ConfigDict(frozen=True)

    title: str
    jobs: dict[str, Job]  # label -> job; one job without a label where nothing varies
    paper: dict[str, Any] | None = None

    @property
    def single_job(self) -> Job | None:
        return self.jobs.get("")


def read_toml(path: Path, kind: str = "recipe") -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{kind} {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{kind} {path} is not valid TOML: {error}") from None


def merge_layers(*layers: Mapping[str, Any]) -> Job:
    """Of tables of keys: what a later one says wins, option by option."""
    flat: dict[str, Any] = {}
    for layer in layers:
        flat |= _flatten(layer)
    return make_job(_unflatten(flat))


def load_recipe(path: Path, overrides: Mapping[str, Any]) -> Recipe:
    content = read_toml(path)
    if "budgets" in content:
        raise UserError(f"recipe {path} is a study; run it with `shoal study`")
    title, paper = str(content.pop("title", path.stem)), content.pop("paper", None)
    only = _method_tables(path, content.pop("only", {}))
    variants = _variant_tables(path, content.pop("variants", {}))
    grid, flags = _grid(path, content.pop("grid", {})), _flatten(overrides)
    grid |= {"variant": list(variants)} if variants and "variant" not in grid else {}
    if "method" in content and "method" in grid:
        raise UserError(f"recipe {path}: method is given and in the grid; it must be one of them")
    written = _flatten(content) | grid
    grid = {k: v for k, v in grid.items() if k not in flags}  # a flag pins what the grid would vary
    jobs: dict[str, Job] = {}
    for label, point in _grid_points(grid):
        if label in jobs:
            raise UserError(
                f"recipe {path}: two points of the grid are called {label!r}; each value must be there once"
            )
        named = _variant_values(path, variants, point.get("variant"))
        values = _flatten(content) | named | flags | point
        jobs[label] = make_job(_unflatten(only.get(str(values.get("method")), {}) | values))
    return Recipe(title=title + _changed_suffix(flags, written, only | variants), jobs=jobs, paper=paper)


def _changed_suffix(
    flags: Mapping[str, Any], written: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> str:
    """A title speaks of what is written: where flags say otherwise, it says so."""
    tables_in_file = [written, *tables.values()]
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
    """{"set": {"train": {"mu": 1}}} -> {"set.train.mu": 1}; other keys as they are."""
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
                raise UserError(f"key {path!r} is {value!r}; options are given as set.piece.key, such as set.train.mu")
            options.setdefault(piece, {})[key[0]] = value
    return values if "set" in values else values | {"set": options}


def _grid_points(grid: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination. A value that is a table, such as {merge = 0.2, split = 0.3} of set.cluster, sets its keys
    together; so does one of `set`, such as {cluster = {by = "kmeans"}}."""
    for values in itertools.product(*grid.values()):
        point: dict[str, Any] = {}
        for key, value in zip(grid, values, strict=True):
            point |= _flatten({key: value})
        yield "-".join(map(_label_part, values)), point


def _label_part(value: Any) -> str:
    """Of a run's name."""
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_label_part(v)}" for k, v in value.items())
    return str(value).replace("/", "_").replace(":", "")
