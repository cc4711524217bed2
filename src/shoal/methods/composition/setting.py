"""The setting from which a method is built: the model, the numbers of the job, and the user's options.

A method creates its objects with `setting.make("train", LocalTraining, ...)`. A field that is declared with
`shoal.types.option` can be set by the user (`--set train.mu=0.1`), which replaces the default of the method. An option
that no object has is refused with the options that it could be, and an option without effect in the method is refused
with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.errors import UnusedOption, UserError, did_you_mean
from shoal.models import Model
from shoal.stages.edges import Topology, parse_edges
from shoal.types import ClientId, Option, Samples

OptionsClass = TypeVar("OptionsClass")
_TYPE_WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text"}
TRAINING_STEP_OPTIONS = ("batch_size", "lr", "momentum", "weight_decay", "clip", "mu")
"""Options of a training program that have no effect with 0 epochs."""
NUMBERS_AS_TEXT = ConfigDict(coerce_numbers_to_str=True)  # the name of a layer may be a number


class AvailableOption(NamedTuple):
    """An option of a method, with its default in this method."""

    default: Any
    declaration: Option
    type_hint: Any  # the type of the value
    condition: str = ""  # the condition under which it has an effect; empty: always

    @property
    def accepted_values(self) -> str:
        """Returns the accepted values in words, such as "whole number, 0 or more" or "size, uniform"."""
        if typing.get_origin(self.type_hint) is typing.Literal:
            return ", ".join(map(str, typing.get_args(self.type_hint)))
        return ", ".join(part for part in (_TYPE_WORDS[self.type_hint], self.declaration.range_text) if part)

    @property
    def meaning(self) -> str:
        """Returns the help text of the option, with the condition under which it has an effect."""
        return self.declaration.help + (f" It has an effect only if {self.condition}." if self.condition else "")


@dataclass
class Setting:
    """The model, the numbers of the job and the options from which a method is built."""

    model: Model
    rounds: int
    cohort_size: int
    epochs: int = 2
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    eval_every: int = 1
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the user: group -> key -> value
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the method: group -> key -> value
    available_options: dict[str, dict[str, AvailableOption]] = field(default_factory=dict)  # group -> key -> option
    # group and key of an option without effect -> the condition under which it would have one
    conditions_of_ineffective: dict[tuple[str, str], str] = field(default_factory=dict)
    public_samples: Samples | None = None  # samples that no client holds
    num_public_requested: int = 0  # the number of public samples that the method would use
    edges: Topology | None = None  # the edge servers; None: one server only
    planted_groups: Mapping[str, int] | None = None  # group of each client, for upper bounds in simulations only
    cloud_every_rounds: int | None = None  # rounds between two averages of the edges; None: the default of the method

    def make(
        self, group: str, options_class: type[OptionsClass], fixed_keys: tuple[str, ...] = (), /, **defaults: Any
    ) -> OptionsClass:
        """Creates `options_class(**defaults)` with the options of a group.

        Defaults of the method replace `defaults`, and values of the user replace both.

        Parameters
        ----------
        group : str
            The group of the options, such as "train" for `train.mu`.
        options_class : type
            A dataclass whose options are fields that are declared with `shoal.types.option`.
        fixed_keys : tuple of str
            Fields that users cannot set in this method.
        **defaults
            Values of fields.

        Returns
        -------
        object of `options_class`

        Raises
        ------
        UserError
            If a value of the user has the wrong type or is out of range.
        """
        user_values, method_defaults = self.options.get(group, {}), self.defaults.get(group, {})
        hints = _type_hints(options_class)  # type: ignore[arg-type]  # mypy takes a class of a TypeVar for unhashable
        values, available = dict(defaults), dict[str, AvailableOption]()
        for f in dataclasses.fields(options_class):  # type: ignore[arg-type]
            declaration: Option | None = f.metadata.get("option")
            if declaration is None or f.name in fixed_keys:
                continue
            if f.name in method_defaults:
                values[f.name] = method_defaults[f.name]
            condition = declaration.only_if.description.format(group=group) if declaration.only_if else ""
            available[f.name] = AvailableOption(values.get(f.name, f.default), declaration, hints[f.name], condition)
            if f.name in user_values:
                values[f.name] = _parsed_value(f"{group}.{f.name}", hints[f.name], user_values[f.name], declaration)
        if available:
            self.available_options.setdefault(group, {}).update(available)
        instance = options_class(**values)
        for key, o in available.items():
            self.conditions_of_ineffective.pop((group, key), None)
            if o.declaration.only_if and not o.declaration.only_if.is_met(instance):
                self.mark_without_effect(group, key, unless=o.condition)
        return instance

    def mark_without_effect(self, group: str, *keys: str, unless: str) -> None:
        """Marks options that have no effect in this method unless the condition `unless` is met.

        This is for conditions that an option cannot declare itself, because they depend on other objects.
        """
        self.conditions_of_ineffective |= dict.fromkeys(((group, key) for key in keys), unless)

    def make_training(
        self, group: str, options_class: type[OptionsClass], fixed_keys: tuple[str, ...] = (), /, **defaults: Any
    ) -> OptionsClass:
        """Creates a training program like `make`, with the model and the training settings of the job."""
        common = {
            "model": self.model,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "momentum": self.momentum,
        }
        program = self.make(group, options_class, fixed_keys, **common | defaults)
        if group != "train" and not getattr(program, "epochs", 1):  # other programs use the options of `train`, too
            self.mark_without_effect(group, *TRAINING_STEP_OPTIONS, unless=f"{group}.epochs is above 0")
        return program

    def request_public_samples(self, num_samples: int) -> Samples | None:
        """Requests this many public samples and returns the available ones, or None.

        There are none if the user asked for none, or if the method is built before the data are loaded.
        """
        self.num_public_requested = max(self.num_public_requested, num_samples)
        return self.public_samples

    def request_edges(self, topology: Topology) -> None:
        """Sets the edges of a method that always has edges, unless the user asked for other edges."""
        self.edges = self.edges or dataclasses.replace(
            topology, cloud_every_rounds=self.cloud_every_rounds or topology.cloud_every_rounds
        )

    def refuse_unknown_options(self, method_name: str, factory: Callable[[Setting], Any]) -> None:
        """Raises `UnusedOption` if an option of the user is unknown, or has no effect and not its default value.

        `factory` is the function that built the method.
        """
        for group, key, value in self._user_options():
            path, option, unless = (
                f"{group}.{key}",
                self.available_options.get(group, {}).get(key),
                self.conditions_of_ineffective.get((group, key)),
            )
            if unless and not (option and _parsed_value(path, option.type_hint, value, None) == option.default):
                raise UnusedOption(
                    f"option {path} is {value!r}, but it has no effect unless {unless}; change that or leave {path} out"
                )
            if option is None:
                self._refuse_excluded_option(group, key, value, factory)
                known_paths = [f"{name}.{k}" for name, keys in self.available_options.items() for k in keys]
                suggestion = did_you_mean(path, known_paths)
                raise UnusedOption(
                    f"option {path} is not known to method {method_name}{suggestion} "
                    f"(it takes {self._option_paths(group)})"
                )

    def _refuse_excluded_option(self, group: str, key: str, value: Any, factory: Callable[[Setting], Any]) -> None:
        """Raises `UnusedOption` if another option excludes this one, such as one that leaves a component out."""
        for other_group, other_key, other_value in self._user_options():
            remaining_options = {
                n: {k: v for k, v in keys.items() if (n, k) != (other_group, other_key)}
                for n, keys in self.options.items()
            }
            trial = dataclasses.replace(
                self, options=remaining_options, available_options={}, conditions_of_ineffective={}
            )
            with suppress(UserError):
                factory(trial)
            if key in remaining_options.get(group, {}) and key in trial.available_options.get(group, {}):
                excluding_option = f"{other_group}.{other_key}={_option_text(other_value)}"
                raise UnusedOption(
                    f"option {group}.{key} is {value!r}, but it has no effect with {excluding_option}; "
                    f"change that or leave {group}.{key} out"
                )

    def _user_options(self) -> list[tuple[str, str, Any]]:
        return [(name, key, value) for name, keys in self.options.items() for key, value in keys.items()]

    def _option_paths(self, name: str) -> str:
        groups = {name: self.available_options[name]} if name in self.available_options else self.available_options
        return ", ".join(f"{group}.{key}" for group, keys in groups.items() for key in keys)


@cache  # without a cache this takes most of the time of building a method
def _type_hints(options_class: Any) -> dict[str, Any]:
    return typing.get_type_hints(options_class)


def _option_text(value: Any) -> str:
    """Returns the value as users write it in `--set OPTION=VALUE`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parsed_value(path: str, type_hint: Any, value: Any, declaration: Option | None) -> Any:
    try:
        typed = TypeAdapter(type_hint, config=NUMBERS_AS_TEXT if type_hint is str else None).validate_python(value)
        if isinstance(typed, float) and not math.isfinite(typed):
            raise UserError(f"option {path} is {value!r}: input should be a finite number")
        if declaration is not None and not declaration.accepts(typed):
            raise UserError(f"option {path} is {value!r}; it must be {declaration.range_text}")
        return typed
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UserError(f"option {path} is {value!r}: {problem[0].lower()}{problem[1:]}") from error


class TrainingJob(Protocol):
    """The fields of a job from which a method is built."""

    rounds: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    eval_every: int
    set: dict[str, dict[str, Any]]
    edges: str | None
    edge_column: str | None
    cloud_every_rounds: int | None


def build_topology(job: TrainingJob, edge_names: Mapping[ClientId, str] | None = None) -> Topology | None:
    """Returns the edges that the job asks for, or None. A method may have edges even if the job asks for none."""
    edges, edge_names = "column" if job.edge_column is not None else job.edges, edge_names or {}
    if edges is None:
        return None
    return Topology(
        *parse_edges(edges, edge_names),
        cloud_every_rounds=job.cloud_every_rounds or Topology.cloud_every_rounds,
        column_values=edge_names,
    )


def build_setting(
    job: TrainingJob,
    model: Model,
    cohort_size: int,
    public_samples: Samples | None = None,
    edge_names: Mapping[ClientId, str] | None = None,
) -> Setting:
    """Returns the setting of a job, for a model, a cohort size and the public samples of a federation."""
    return Setting(
        model=model,
        rounds=job.rounds,
        cohort_size=cohort_size,
        epochs=job.epochs,
        batch_size=job.batch_size,
        lr=job.lr,
        momentum=job.momentum,
        eval_every=job.eval_every,
        options=job.set,
        public_samples=public_samples,
        edges=build_topology(job, edge_names),
        cloud_every_rounds=job.cloud_every_rounds,
    )
