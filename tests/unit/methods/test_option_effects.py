"""Every option does something. None escapes: options are found by building all methods and all pieces."""

from __future__ import annotations

import pytest
from option_effects import Case, distinct_pairs, find_case, run, try_option

from shoal.methods import available_options

PAIRS = [pytest.param(*pair, id=f"{pair[0]} {pair[1]}") for pair in distinct_pairs()]


@pytest.mark.parametrize(("method", "path", "option"), PAIRS)
def test_another_value_changes_what_a_run_leaves_or_serves(method, path, option):
    attempt = try_option(method, path, option)
    assert attempt.outcome == "changed", f"{attempt.outcome}: {attempt.detail}"


@pytest.mark.parametrize("method", ["fedepc", "scmoe", "aggregate=secure"])
def test_the_same_options_change_nothing(method):
    assert run(method, Case(), {}) == run(method, Case(), {})


def test_a_value_that_does_not_matter_is_found():
    clip = available_options("fedavg")["train"]["clip"]
    assert try_option("fedavg", "train.clip", clip, Case((1e9,))).outcome == "NO EFFECT"


def test_a_refusal_is_reported_with_its_reason():
    decay = available_options("fedavg")["train"]["decay"]
    attempt = try_option("fedavg", "train.decay", decay, Case())
    assert (attempt.outcome, attempt.detail.split(" unless ")[1]) == (
        "refused",
        "train.schedule is not constant; change that or leave train.decay out",
    )
    assert find_case("fedavg", "train.decay").options == {"train": {"schedule": "cosine"}}
