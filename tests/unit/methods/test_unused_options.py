"""An option that changes nothing in the chosen method is refused with the reason, and a default never is."""

from __future__ import annotations

import re

import pytest

from shoal.errors import UnusedOption, UserError
from shoal.methods import METHODS, Setting, available_options, build, default_options, dry_build
from shoal.models import load_model


def setting(options, **kw):
    return Setting(load_model("mlp", (6,), 4), **{"rounds": 3, "cohort_size": 3, "options": options, **kw})


@pytest.mark.parametrize(
    ("method", "options", "path", "unless"),
    [
        ("fedavg", {"train": {"decay": 0.5}}, "train.decay", "train.schedule is not constant"),
        ("pfmoe", {"gate": {"temperature": 2.0}}, "gate.temperature", "gate.calibrate or gate.denoise is true"),
        ("scmoe", {"gate": {"top": 0, "shortlist": 5}}, "gate.shortlist", "gate.top is above 0, gate.prior is learned"),
        ("scmoe", {"gate": {"prior": "uniform", "hidden": 8}}, "gate.hidden", "gate.prior is learned"),
        ("scmoe", {"gate": {"prior": "uniform", "lr": 0.1}}, "gate.lr", "gate.prior is learned and gate.epochs is"),
        (
            "scmoe",
            {"cluster": {"algorithm": "kmeans", "max_centre_similarity": 0.1}},
            "cluster.max_centre_similarity",
            "cluster.algorithm is mctc",
        ),
        (
            "shoal",
            {"train": {"logit_adjustment": "off", "uniform_mix": 0.5}},
            "train.uniform_mix",
            "logits are adjusted, as with train.logit_adjustment=on",
        ),
        (
            "shoal",
            {"train": {"logit_adjustment": "off", "classwise_head": False}},
            "train.classwise_head",
            "logits are adjusted",
        ),
        (
            "shoal",
            {"represent": {"rerelease_threshold": 0.5}},
            "represent.rerelease_threshold",
            "represent.noise_scale is above 0",
        ),
        (
            "simclust",
            {"represent": {"noise_scale": 1, "rerelease_threshold": 0.5}},
            "represent.rerelease_threshold",
            "represent.noise_scale and represent.every_rounds",
        ),
        (
            "fedepc",
            {"cluster": {"drift_ratio": 2}},
            "cluster.drift_ratio",
            "represent.every_rounds is above 0 and represent.noise_std is 0",
        ),
        ("fedepc", {"represent": {"epochs": 0, "lr": 0.2}}, "represent.lr", "represent.epochs is above 0"),
        ("ditto", {"personal": {"epochs": 0, "mu": 0.2}}, "personal.mu", "personal.epochs is above 0"),
        (
            "fedepc",
            {"select": {"rule": "random", "num_candidate_sets": 3}},
            "select.num_candidate_sets",
            "select.rule is not random",
        ),
        ("fedavg-ft", {"personalise": {"search": True, "lr": 0.2}}, "personalise.lr", "personalise.search is false"),
        ("fedavg-ft", {"personalise": {"lr_grid": "0.1"}}, "personalise.lr_grid", "personalise.search is true"),
        (
            "fedavg-ft",
            {"personalise": {"epochs": 0, "part": "head"}},
            "personalise.part",
            "personalise.epochs is above",
        ),
        (
            "apcsma",
            {"share": {"num_samples": 3}},
            "share.num_samples",
            "share.source is clients and coefficients.steps is above 0",
        ),
        ("fce", {"serve": {"logit_weight": 1.0}}, "serve.logit_weight", "serve.rule is density"),
    ],
)
def test_an_option_without_effect_is_refused_with_its_condition(method, options, path, unless):
    with pytest.raises(UnusedOption) as refusal:
        build(method, setting(options))
    message = str(refusal.value)
    assert re.match(rf"option {re.escape(path)} is \S+, but it has no effect unless {re.escape(unless)}", message)
    assert message.endswith(f"; change that or leave {path} out")


@pytest.mark.parametrize(
    ("method", "options", "excluding_option"),
    [
        ("shoal", {"components": {"experts": False}, "probe": {"first_round": 3}}, "components.experts=false"),
        ("apcsma", {"update": {"kappa": 0.5}, "components": {"conditional_update": False}}, "components.conditional_"),
        ("apcsma", {"share": {"source": "none"}, "coefficients": {"steps": 9}}, "share.source=none"),
        ("select=contribution", {"share": {"source": "none"}, "coefficients": {"lr": 1.0}}, "share.source=none"),
    ],
)
def test_an_option_that_another_one_excludes_is_refused_with_the_other(method, options, excluding_option):
    with pytest.raises(UnusedOption, match=f"but it has no effect with {excluding_option}"):
        build(method, setting(options))


def test_settings_of_the_run_count_too():
    options = {"train": {"uniform_mix": 0.5}}
    build("shoal", setting(options, epochs=2))
    with pytest.raises(
        UnusedOption, match=r"train\.uniform_mix is 0\.5, but it has no effect unless logits are adjusted"
    ):
        build("shoal", setting(options, epochs=1))


def test_what_another_piece_takes_too_has_an_effect():
    """Label counts are for the adjusted loss and for the correction of predictions."""
    options = {"prior": {"every_rounds": 3}, "train": {"logit_adjustment": "off"}}
    build("shoal", setting(options))
    with pytest.raises(
        UnusedOption, match=r"prior\.every_rounds is 3, but it has no effect unless logits are adjusted"
    ):
        build("train=adjusted", setting(options))


def test_clients_without_a_gate_need_the_temperature_without_calibration_too():
    dry_build("scmoe", {"gate": {"calibrate": False, "temperature": 2.0}})


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_never_refused(method):
    build(method, setting(default_options(method)))


@pytest.mark.parametrize("method", METHODS)
def test_conditions_name_options_of_the_method(method):
    available = available_options(method)
    named = {
        name
        for keys in available.values()
        for option in keys.values()
        for name in re.findall(r"[a-z_]+\.[a-z_]+", option.condition)
    }
    assert named <= {f"{group}.{key}" for group, keys in available.items() for key in keys}


def test_the_meaning_of_an_option_says_when_it_has_an_effect():
    available = available_options("fedavg")["train"]
    assert available["decay"].meaning.endswith("It has an effect only if train.schedule is not constant.")
    assert available["weighting"].meaning == available["weighting"].declaration.help


def test_a_value_that_is_wrong_is_refused_as_such_whether_or_not_it_would_have_an_effect():
    with pytest.raises(UserError, match=r"option train\.decay is 7; it must be above 0 and at most 1"):
        build("fedavg", setting({"train": {"decay": 7}}))
