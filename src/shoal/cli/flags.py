"""The flags of a job, built from the declarations of its settings."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import click
import typer
from click.core import ParameterSource

from shoal.experiment.declaration import Declaration
from shoal.experiment.job import SETTINGS, parse_amount, parse_options


def _flag(setting: Declaration) -> Parameter:
    """Returns the flag of a setting. A value that is not one number or boolean stays text, which the job parses."""
    flag = str(setting.flag)
    plain = len(setting.types) == 1 and setting.types[0] in (bool, int, float)
    kind: Any = list[str] if setting.is_repeated else setting.types[0] if plain else str
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag,
        help=setting.help_text + (" Repeat the flag for more than one." if setting.is_repeated else ""),
        metavar="|".join(setting.choices) or ("NUMBER" if setting.is_amount else None),
        rich_help_panel=setting.panel,
        show_default=setting.unset_meaning or True,
    )
    default = None if setting.unset_meaning else setting.default
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, option])


FLAGS = {name: _flag(setting) for name, setting in SETTINGS.items() if setting.flag}
# The seed is one of them, because the partition depends on it.
DATA_FLAGS = tuple(n for n in FLAGS if n == "seed" or (SETTINGS[n].scope in ("data", "partition") and n != "data"))


def job_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the named flags of a job as `**flags`. `user_flags` returns those that the user wrote."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in signature(command).parameters.values() if p.name != "flags"]
        parameters = [*own, *(FLAGS[n] for n in names)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return add


def user_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the flags that the user wrote. A recipe may have values for the others."""
    source = click.get_current_context().get_parameter_source
    return {n: v for n, v in flags.items() if source(n) is not ParameterSource.DEFAULT}


def overrides(flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a job for flags that the user wrote."""
    values: dict[str, Any] = {k: parse_amount(f"--{k}", v) if SETTINGS[k].is_amount else v for k, v in flags.items()}
    values["set"] = parse_options(values.pop("set", []))
    return values
