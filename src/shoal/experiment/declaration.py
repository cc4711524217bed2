"""How a setting of a job is declared.

The flag of the command line, the error messages and the page of settings all follow from the one declaration in job.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Panel = Literal[
    "Data",
    "Clients",
    "Model and method",
    "Training",
    "Evaluation",
    "Devices and energy",
    "Edges",
    "Privacy",
    "Execution",
]
PANELS: tuple[Panel, ...] = get_args(Panel)
Scope = Literal["run", "data", "partition", "device", "measurement", "storage"]

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below"}  # as pydantic's Field calls them
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
    dict: "a table of tables",
}


def setting(
    default: Any,
    description: str,
    *,
    panel: Panel,
    scope: Scope = "run",
    flag: str | None = "",
    unset_meaning: str = "",
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declares a field of a job.

    Parameters
    ----------
    default : Any
        Value of the field where nothing is given.
    description : str
        Full sentences: what the setting does, its unit, and its values if they are names. The default and the range
        are added wherever the description is shown.
    panel : Panel
        Heading under which the help and the page of settings list the field.
    scope : Scope
        What the setting belongs to. `shoal.run` takes only settings of the run, because its federation has its data
        already.
    flag : str or None
        Flag of the command line. By default it follows from the field's name, and None stands for no flag.
    unset_meaning : str
        Words for a default of None or for an empty default.
    gt, ge, lt : float, optional
        Bounds of a number: above, at least, below.

    Returns
    -------
    FieldInfo
        Field of a pydantic model.
    """
    shown: dict[str, Any] = {"panel": panel, "scope": scope, "flag": flag, "unset_meaning": unset_meaning}
    return Field(default, description=description, json_schema_extra=shown, gt=gt, ge=ge, lt=lt)


@dataclass(frozen=True)
class Declaration:
    """The declaration of one setting."""

    name: str
    annotation: Any  # type of the values that users may give
    default: Any
    description: str
    panel: Panel
    scope: Scope
    flag: str | None
    unset_meaning: str
    bounds: str  # such as "at least 1"; empty if there are none

    @property
    def types(self) -> tuple[Any, ...]:
        """Types of the values that users may give, without None."""
        union = get_args(self.annotation) if get_origin(self.annotation) not in (Literal, tuple, dict) else ()
        return tuple(kind for kind in union if kind is not NoneType) or (self.annotation,)

    @property
    def is_amount(self) -> bool:
        """Whether the value is a number of clients or a fraction of them."""
        return set(self.types) == {int, float}

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be given several times."""
        return any(get_origin(kind) in (tuple, dict) for kind in self.types)

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted texts, if only some are accepted, else nothing."""
        return get_args(self.annotation) if get_origin(self.annotation) is Literal else ()

    @property
    def _type_phrases(self) -> list[str]:
        if self.choices:
            return ["one of " + ", ".join(self.choices)]
        return ["a number"] if self.is_amount else [_WORDS[get_origin(kind) or kind] for kind in self.types]

    @property
    def type_words(self) -> str:
        """Words for the type, such as "whole number"."""
        return " or ".join(words.removeprefix("a ") for words in self._type_phrases)

    @property
    def accepted(self) -> str:
        """Words for the accepted values, such as "a whole number, at least 1"."""
        return " or ".join(self._type_phrases) + (f", {self.bounds}" if self.bounds else "")

    @property
    def help_text(self) -> str:
        """The description with the range of values."""
        return self.description + (f" It must be {self.bounds}." if self.bounds else "")


def declarations(model: type[BaseModel]) -> dict[str, Declaration]:
    """Returns the settings that a pydantic model declares, by name, in the order of the panels."""
    declared = [_declaration(name, field) for name, field in model.model_fields.items()]
    return {d.name: d for d in sorted(declared, key=lambda d: PANELS.index(d.panel))}


def _declaration(name: str, field: FieldInfo) -> Declaration:
    shown: Any = field.json_schema_extra
    flag = f"--{name.replace('_', '-')}" if shown["flag"] == "" else shown["flag"]
    bounds = [f"{_BOUNDS[k]} {getattr(entry, k)}" for entry in field.metadata for k in _BOUNDS if hasattr(entry, k)]
    return Declaration(
        name=name,
        annotation=_accepted_type(field),
        default=field.default,
        description=field.description or "",
        panel=shown["panel"],
        scope=shown["scope"],
        flag=flag,
        unset_meaning=shown["unset_meaning"],
        bounds=" and ".join(bounds),
    )


def _accepted_type(field: FieldInfo) -> Any:
    """Returns the type that users may give. A validator may accept more types than the field has."""
    for entry in field.metadata:
        if isinstance(entry, BeforeValidator) and entry.json_schema_input_type is not PydanticUndefined:
            return entry.json_schema_input_type
    return field.annotation
