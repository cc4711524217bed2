"""Declarations of settings, and what follows from them."""

from __future__ import annotations

import inspect
import re
import typing
from collections import Counter
from typing import get_args

import pytest
from federations import tiny_federation
from pydantic import BaseModel
from sentences import complaint

import shoal
from shoal.cost.devices import PROFILES
from shoal.cost.links import LINKS
from shoal.data.federation import DEFAULT_SENSITIVE_FRACTION
from shoal.data.partitions import BASES
from shoal.data.shifts import SHIFTS
from shoal.errors import UserError
from shoal.experiment.assemble import DEFAULT_CLOUD_LINK, DEVICES, load_federation
from shoal.experiment.declaration import PANELS, Scope, declarations, setting
from shoal.experiment.job import SETTINGS, Job, make_job
from shoal.experiment.settings import JobSettings
from shoal.models import model_names
from shoal.stages.edges import Topology

RUN_SETTINGS = {name for name, declared in SETTINGS.items() if declared.scope == "run" and name != "method"}
NUMBERS = [name for name, declared in SETTINGS.items() if declared.bounds]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_description_is_a_sentence(name):
    assert complaint(name, SETTINGS[name].description) == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "there is none"),
        ("The batch size.", "it has fewer than five words"),
        ("The number of samples in a batch", "it has no full stop"),
        ("number of samples in a batch.", "it does not begin as a sentence"),
        ("Set the size of the batches to this value.", "it says no more than the name"),
        ("Use this many samples in each step of local training.", ""),
    ],
)
def test_poor_descriptions_are_found(text, wrong):
    assert complaint("batch_size", text) == wrong


def test_descriptions_differ():
    repeated = [text for text, times in Counter(d.description for d in SETTINGS.values()).items() if times > 1]
    assert repeated == []


@pytest.mark.parametrize("name", SETTINGS)
def test_an_unset_default_has_words(name):
    assert (SETTINGS[name].unset_meaning == "") == (SETTINGS[name].default not in (None, (), {}))


def test_words_for_defaults_match_the_values():
    assert SETTINGS["cloud_every_rounds"].unset_meaning.startswith(f"{Topology.cloud_every_rounds} ")
    assert SETTINGS["cloud_link"].unset_meaning.startswith(f"{DEFAULT_CLOUD_LINK} ")
    assert SETTINGS["sensitive_fraction"].unset_meaning.startswith(f"{DEFAULT_SENSITIVE_FRACTION}, ")
    assert SETTINGS["clients"].unset_meaning.startswith(f"{len(load_federation(Job()))}, ")


@pytest.mark.parametrize(
    ("setting_name", "values"),
    [
        ("model", model_names()),
        ("devices", PROFILES),
        ("link", LINKS),
        ("cloud_link", LINKS),
        ("device", DEVICES),
        ("partition", [*BASES, *SHIFTS]),
        ("fleet", SETTINGS["fleet"].choices),
        ("measure", SETTINGS["measure"].choices),
        ("edges", ["random", "similar", "diverse", "none"]),
    ],
)
def test_descriptions_name_every_value(setting_name, values):
    words = re.findall(r"[\w-]+", SETTINGS[setting_name].description)
    assert set(values) <= set(words)


def test_every_panel_and_every_scope_is_used():
    assert {declared.panel for declared in SETTINGS.values()} == set(PANELS)
    assert {declared.scope for declared in SETTINGS.values()} == set(get_args(Scope))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"lr": -1}, "lr is -1: it must be above 0"),
        ({"lr": -1.0}, "lr is -1: it must be above 0"),
        ({"lr": float("nan")}, "lr is nan: it must be a finite number, above 0"),
        ({"lr": "fast"}, "lr is 'fast': it must be a number, above 0"),
        ({"rounds": 0}, "rounds is 0: it must be at least 1"),
        ({"rounds": 2.5}, "rounds is 2.5: it must be a whole number, at least 1"),
        ({"clients": 0}, "clients is 0: it must be at least 1"),
        ({"val_fraction": 1.0}, "val_fraction is 1: it must be at least 0 and below 1"),
        ({"test_fraction": 0}, "test_fraction is 0: it must be above 0 and below 1"),
        ({"cohort": "all"}, "cohort is 'all': it must be a number"),
        ({"unseen": float("inf")}, "unseen is inf: it must be a finite number"),
        ({"model": 3}, "model is 3: it must be a text"),
        ({"count_idle": "perhaps"}, "count_idle is 'perhaps': it must be true or false"),
        ({"measure": "meter"}, "measure is 'meter': it must be one of none, codecarbon"),
        ({"edges": 1.5}, "edges is 1.5: it must be a whole number or a text"),
        ({"drop_columns": "id"}, "drop_columns is 'id': it must be a list of texts"),
        ({"drop_columns": ["id", 3]}, "drop_columns is ['id', 3]: it must be a list of texts"),
        ({"set": {"train": 1}}, "set is {'train': 1}: it must be a table of tables"),
    ],
)
def test_an_error_names_the_setting_the_value_and_the_accepted_values(values, sentence):
    with pytest.raises(UserError) as refused:
        make_job(values)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_in_words_are_the_enforced_ones(name):
    for bound in SETTINGS[name].bounds.split(" and "):
        words, number = bound.rsplit(" ", 1)
        value, outside = float(number), {"above": 0, "at least": -1, "below": 0}[words]
        with pytest.raises(UserError, match=SETTINGS[name].bounds):
            make_job({name: int(value) + outside})
        inside = int(value) + {"above": 1, "at least": 0, "below": -1}[words]
        if " and " not in SETTINGS[name].bounds:
            assert getattr(make_job({name: inside}), name) == inside


def test_jobs_do_not_share_mutable_defaults():
    assert Job().set == {}
    assert Job().set is not Job().set


def test_a_declaration_is_read_from_the_field():
    class Oven(BaseModel):
        heat_c: int | None = setting(
            None, "Bake at this many degrees.", panel="Training", unset_meaning="cold", gt=20, lt=300
        )
        trays: tuple[str, ...] = setting(("low",), "Put these trays in.", panel="Data", scope="data", flag="--tray")

    trays, heat = declarations(Oven).values()  # in the order of the panels
    assert (heat.flag, heat.scope, heat.accepted) == ("--heat-c", "run", "a whole number, above 20 and below 300")
    assert heat.help_text == "Bake at this many degrees. It must be above 20 and below 300."
    assert (trays.flag, trays.scope, trays.is_repeated, trays.default) == ("--tray", "data", True, ("low",))
    assert trays.help_text == "Put these trays in."


class TestRunInMemory:
    def test_its_type_has_exactly_the_settings_of_the_run(self):
        keys = inspect.signature(shoal.run).parameters["keys"]
        assert keys.annotation == "Unpack[JobSettings]"
        assert set(typing.get_type_hints(JobSettings)) == RUN_SETTINGS

    @pytest.mark.parametrize("name", sorted(RUN_SETTINGS))
    def test_it_takes_every_setting_of_the_run(self, name):
        quick = {"rounds": 1, "cohort": 2, "epochs": 1, "model": "linear", "fleet": "plain"}
        value = {"edges": 2, "cloud_link": "wifi", "cloud_every_rounds": 1}.get(name, SETTINGS[name].default)
        more = {"edges": 2} if name in ("cloud_link", "cloud_every_rounds") else {}
        result = shoal.run("fedavg", tiny_federation(), **quick | more | ({} if name in quick else {name: value}))
        assert len(result.rounds) == 1

    @pytest.mark.parametrize("name", sorted(set(SETTINGS) - RUN_SETTINGS - {"method"}))
    def test_it_refuses_every_other_setting(self, name):
        endings = {
            "data": "shoal.run gets a federation that has its data. Pass the setting to shoal.load.",
            "partition": "shoal.run gets a federation that is divided already. Pass the setting to shoal.partition.",
            "device": "shoal.run gets a federation that is divided already. Pass the setting to shoal.partition.",
            "measurement": "shoal.run measures no energy. Use the command line.",
            "storage": "shoal.run writes no checkpoints. Use the command line.",
        }
        with pytest.raises(UserError) as refused:
            shoal.run("fedavg", tiny_federation(), **{name: SETTINGS[name].default})
        assert str(refused.value) == f"{name} is {SETTINGS[name].default!r}, but {endings[SETTINGS[name].scope]}"

    @pytest.mark.parametrize(
        ("function", "parts"), [(shoal.load, ["data"]), (shoal.partition, ["partition", "device"])]
    )
    def test_refused_settings_are_parameters_of_the_named_function(self, function, parts):
        names = {name for name, declared in SETTINGS.items() if declared.scope in parts}
        assert names - {"data", "partition"} <= set(inspect.signature(function).parameters)

    def test_an_unknown_key_is_refused(self):
        with pytest.raises(UserError, match="key 'round' is not known; did you mean rounds"):
            shoal.run("fedavg", tiny_federation(), round=3)
