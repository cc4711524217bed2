"""An option that changes nothing in the chosen method is refused with the reason, and a default never is."""

from __future__ import annotations

import re

import pytest

from shoal.errors import UnusedOption, UserError
from shoal.methods import METHODS, Setting, available_options, build, default_options, dry_build
from shoal.models import load_model


def setting(given, **kw):
    return Setting(load_model("mlp", (6,), 4), **{"rounds": 3, "cohort": 3, "options": given, **kw})


@pytest.mark.parametrize(
    ("method", "given", "path", "unless"),
    [
        ("fedavg", {"train": {"decay": 0.5}}, "train.decay", "train.schedule is not constant"),
        ("pfmoe", {"gate": {"temperature": 2.0}}, "gate.temperature", "gate.calibrate or gate.denoise is true"),
        ("scmoe", {"gate": {"top": 0, "shortlist": 5}}, "gate.shortlist", "gate.top is above 0, gate.prior is learned"),
        ("scmoe", {"gate": {"prior": "uniform", "hidden": 8}}, "gate.hidden", "gate.prior is learned"),
        ("scmoe", {"gate": {"prior": "uniform", "lr": 0.1}}, "gate.lr", "gate.prior is learned and gate.epochs is"),
        ("scmoe", {"cluster": {"by": "kmeans", "limit": 0.1}}, "cluster.limit", "cluster.by is mctc"),
        (
            "shoal",
            {"train": {"adjust": "off", "lam": 0.5}},
            "train.lam",
            "logits are adjusted, as with train.adjust=on",
        ),
        ("shoal", {"train": {"adjust": "off", "head": False}}, "train.head", "logits are adjusted"),
        ("shoal", {"represent": {"anew": 0.5}}, "represent.anew", "represent.gamma is above 0"),
        ("simclust", {"represent": {"gamma": 1, "anew": 0.5}}, "represent.anew", "represent.gamma and represent.every"),
        ("fedepc", {"cluster": {"drift": 2}}, "cluster.drift", "represent.every is above 0 and represent.noise is 0"),
        ("fedepc", {"represent": {"epochs": 0, "lr": 0.2}}, "represent.lr", "represent.epochs is above 0"),
        ("ditto", {"personal": {"epochs": 0, "mu": 0.2}}, "personal.mu", "personal.epochs is above 0"),
        ("fedepc", {"select": {"choice": "random", "sets": 3}}, "select.sets", "select.choice is not random"),
        ("fedavg-ft", {"personalise": {"tune": True, "lr": 0.2}}, "personalise.lr", "personalise.tune is false"),
        ("fedavg-ft", {"personalise": {"rates": "0.1"}}, "personalise.rates", "personalise.tune is true"),
        (
            "fedavg-ft",
            {"personalise": {"epochs": 0, "part": "head"}},
            "personalise.part",
            "personalise.epochs is above",
        ),
        ("apcsma", {"share": {"rows": 3}}, "share.rows", "share.rows_of is clients and learn.steps is above 0"),
        ("fce", {"serve": {"trust": 1.0}}, "serve.trust", "serve.rule is density"),
    ],
)
def test_what_has_no_effect_is_refused_with_what_it_needs(method, given, path, unless):
    with pytest.raises(UnusedOption) as refused:
        build(method, setting(given))
    said = str(refused.value)
    assert re.match(rf"option {re.escape(path)} is \S+, but it has no effect unless {re.escape(unless)}", said)
    assert said.endswith(f"; change that or leave {path} out")


@pytest.mark.parametrize(
    ("method", "given", "because"),
    [
        ("shoal", {"components": {"experts": False}, "probe": {"at": 3}}, "components.experts=false"),
        ("apcsma", {"update": {"kappa": 0.5}, "components": {"conditional_update": False}}, "components.conditional_"),
        ("apcsma", {"share": {"rows_of": "nobody"}, "learn": {"steps": 9}}, "share.rows_of=nobody"),
        ("select=contribution", {"share": {"rows_of": "nobody"}, "learn": {"lr": 1.0}}, "share.rows_of=nobody"),
    ],
)
def test_an_option_that_another_one_excludes_is_refused_with_the_other(method, given, because):
    with pytest.raises(UnusedOption, match=f"but it has no effect with {because}"):
        build(method, setting(given))


def test_settings_of_the_run_count_too():
    given = {"train": {"lam": 0.5}}
    build("shoal", setting(given, epochs=2))
    with pytest.raises(UnusedOption, match=r"train\.lam is 0\.5, but it has no effect unless logits are adjusted"):
        build("shoal", setting(given, epochs=1))


def test_what_another_piece_takes_too_has_an_effect():
    """Label counts are for the adjusted loss and for the correction of predictions."""
    given = {"prior": {"every": 3}, "train": {"adjust": "off"}}
    build("shoal", setting(given))
    with pytest.raises(UnusedOption, match=r"prior\.every is 3, but it has no effect unless logits are adjusted"):
        build("train=adjusted", setting(given))


def test_clients_without_a_gate_need_the_temperature_without_calibration_too():
    dry_build("scmoe", {"gate": {"calibrate": False, "temperature": 2.0}})


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_never_refused(method):
    build(method, setting(default_options(method)))


@pytest.mark.parametrize("method", METHODS)
def test_conditions_name_options_of_the_method(method):
    known = available_options(method)
    named = {
        name
        for keys in known.values()
        for option in keys.values()
        for name in re.findall(r"[a-z]+\.[a-z_]+", option.condition)
    }
    assert named <= {f"{group}.{key}" for group, keys in known.items() for key in keys}


def test_the_meaning_of_an_option_says_when_it_has_an_effect():
    known = available_options("fedavg")["train"]
    assert known["decay"].meaning.endswith("It has an effect only if train.schedule is not constant.")
    assert known["weighting"].meaning == known["weighting"].declaration.help


def test_a_value_that_is_wrong_is_refused_as_such_whether_or_not_it_would_have_an_effect():
    with pytest.raises(UserError, match=r"option train\.decay is 7; it must be above 0 and at most 1"):
        build("fedavg", setting({"train": {"decay": 7}}))
