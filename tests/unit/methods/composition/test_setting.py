"""Every option of a method says what it means and which values it accepts, where its field is declared."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re

import pytest

import shoal.client
import shoal.methods
import shoal.stages
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.methods import METHODS, available_options, default_options, dry_build
from shoal.methods.composition.setting import Setting
from shoal.models import load_model
from shoal.types import HasOptions, Option, option

STOP_WORDS = {"a", "an", "the", "of", "for", "to", "in", "is", "this", "that", "it", "and", "or", "number", "option"}


def classes_in(package):
    """The dataclasses of every module of a package, each where it is defined."""
    for module_info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(module_info.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module_info.name and dataclasses.is_dataclass(value):
                yield value


def options_of(cls):
    """The options that a class declares itself: those that it inherits are looked at where they are declared."""
    own = vars(cls).get("__annotations__", {})
    return {f.name: f.metadata["option"] for f in dataclasses.fields(cls) if "option" in f.metadata and f.name in own}


CLASSES = [c for package in (shoal.client, shoal.stages, shoal.methods) for c in classes_in(package) if options_of(c)]
DECLARED = {f"{c.__module__}.{c.__name__}.{name}": (name, o) for c in CLASSES for name, o in options_of(c).items()}


def words(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def faults(name: str, help: str) -> list[str]:
    """What is wrong with the meaning of an option of this name."""
    content = [w for w in words(help) if w not in STOP_WORDS]
    checks = [
        ("has fewer than five words", len(words(help)) < 5),
        ("does not end with a full stop", not help.endswith(".")),
        ("does not begin with a capital letter", not help[:1].isupper()),
        ("only repeats the name", all(any(w.startswith(part) for part in words(name)) for w in content)),
        ("has two spaces or a line break", bool(re.search(r"\s\s|\n", help))),
    ]
    return [fault for fault, is_found in checks if is_found]


@pytest.mark.parametrize("method", METHODS)
def test_every_option_of_a_method_has_a_meaning(method):
    wrong = {
        f"{group}.{key}": problems
        for group, keys in available_options(method).items()
        for key, o in keys.items()
        if (problems := faults(key, o.meaning))
    }
    assert not wrong


def test_meanings_are_sentences():
    assert len(DECLARED) > 100
    wrong = {field: problems for field, (name, o) in DECLARED.items() if (problems := faults(name, o.help))}
    assert not wrong


def test_no_two_options_have_the_same_meaning():
    fields_by_meaning: dict[str, list[str]] = {}
    for field, (_, o) in DECLARED.items():
        fields_by_meaning.setdefault(o.help, []).append(field)
    assert [fields for fields in fields_by_meaning.values() if len(fields) > 1] == []


@pytest.mark.parametrize(
    ("name", "help", "fault"),
    [
        ("lr", "Learning rate of SGD.", "has fewer than five words"),
        ("lr", "Multiply each gradient by this learning rate", "does not end with a full stop"),
        ("batch_size", "The size of a batch, the batch size.", "only repeats the name"),
        ("lr", "multiply each gradient by this learning rate.", "does not begin with a capital letter"),
    ],
)
def test_a_bad_meaning_is_found(name, help, fault):
    assert fault in faults(name, help)


def test_classes_with_ranges_check_them():
    ranged = [c for c in CLASSES if any(o.range_text for o in options_of(c).values())]
    assert [c.__name__ for c in ranged if not issubclass(c, HasOptions)] == []


def test_defaults_are_in_their_ranges():
    outside = [
        f"{c.__name__}.{f.name}"
        for c in CLASSES
        for f in dataclasses.fields(c)
        if f.name in options_of(c) and not options_of(c)[f.name].accepts(f.default)
    ]
    assert not outside


@dataclasses.dataclass(frozen=True)
class Chosen(HasOptions):
    model: object
    classes: int = 3
    spread: float = option(2.0, "Raise class shares to this power before they are added.", gt=0, le=4)
    kind: str = "plain"
    name: str = "select"


def setting(**options):
    return Setting(load_model("mlp", (1,), 2), rounds=1, cohort_size=1, options=options)


def test_only_fields_declared_as_options_are_options():
    chosen_setting = setting()
    chosen_setting.make("select", Chosen, model=None)
    assert {group: list(keys) for group, keys in chosen_setting.available_options.items()} == {"select": ["spread"]}
    assert chosen_setting.available_options["select"]["spread"].accepted_values == "number, above 0 and at most 4"
    assert (
        chosen_setting.available_options["select"]["spread"].meaning
        == "Raise class shares to this power before they are added."
    )


@pytest.mark.parametrize("wrong", [0, -1.5, 4.5])
def test_a_value_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(UserError, match=rf"option select\.spread is {wrong}; it must be above 0 and at most 4"):
        setting(select={"spread": wrong}).make("select", Chosen, model=None)
    with pytest.raises(UserError, match=rf"^select\.spread is {wrong}; it must be above 0 and at most 4"):
        Chosen(None, spread=wrong)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({}, ""),
        ({"ge": 0}, "0 or more"),
        ({"gt": 1}, "above 1"),
        ({"ge": 0, "le": 1}, "from 0 to 1"),
        ({"ge": -1, "lt": 1}, "from -1 to below 1"),
        ({"gt": 0, "le": 1}, "above 0 and at most 1"),
    ],
)
def test_ranges_in_words(bounds, words):
    assert Option("", **bounds).range_text == words


def test_a_literal_value_that_is_not_known_is_refused_with_the_ones_that_are():
    with pytest.raises(UserError, match=r"option train\.schedule is 'cosin': input should be 'constant', 'cosine'"):
        dry_build("fedavg", {"train": {"schedule": "cosin"}})


def test_groups_of_direct_errors_are_those_of_the_command_line():
    with pytest.raises(UserError, match=r"^train\.lr is -1; it must be 0 or more$"):
        LocalTraining(load_model("mlp", (1,), 2), lr=-1)


def test_options_are_the_defaults():
    described = available_options("fedprox")
    assert default_options("fedprox") == {g: {k: o.default for k, o in keys.items()} for g, keys in described.items()}
    assert default_options("fedprox")["train"]["mu"] == 0.1
