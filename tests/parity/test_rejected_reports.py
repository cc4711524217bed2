"""A rejected report has the same effect as a report that never arrived, and no clean report is rejected."""

from __future__ import annotations

import pytest
from federations import tiny_federation
from quick import quick_options

from shoal import engine, tree
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.fleet.faulty import Fault, FaultyFleet
from shoal.methods import METHODS

SPOILED_METHODS = ("fedavg", "shoal", "fedepc", "scmoe", "apcsma", "repclust", "fce")


def run_method(method, kind=None):
    """Runs with faults of two clients in some rounds, in all stages."""
    federation = tiny_federation(6)
    job = Job(
        method=method, model="mlp", rounds=3, cohort=4, epochs=1, batch_size=16, seed=4, set=quick_options(method)
    )
    experiment, private = assemble(job, method, federation), {}
    fleet = make_fleet(experiment, private)
    faults = [] if kind is None else [Fault("c1", kind, {1, 3}), Fault("c4", kind, {1, 2})]
    result = engine.run(experiment.method, FaultyFleet(fleet, faults), rounds=3, seed=4, eval_every=2)
    return result, private


@pytest.fixture(scope="module")
def dropped():
    """Returns the run of each method in which the reports do not arrive."""
    runs = {}

    def get(method):
        if method not in runs:
            runs[method] = run_method(method, "drop")
        return runs[method]

    return get


def bytes_of(nested):
    return {path: x.cpu().numpy().tobytes() for path, x in tree.flatten(nested).items()}


@pytest.mark.parametrize("kind", ["nan", "shape", "name"])
@pytest.mark.parametrize("method", SPOILED_METHODS)
def test_a_rejected_report_is_like_one_that_did_not_arrive(method, kind, dropped):
    expected, expected_private = dropped(method)
    found, private = run_method(method, kind)
    assert sum(len(r.rejected) for r in found.rounds) > 0
    assert not any(r.rejected for r in expected.rounds)
    assert bytes_of(found.state.models) == bytes_of(expected.state.models)
    assert bytes_of(found.state.membership) == bytes_of(expected.state.membership)
    assert bytes_of(found.state.memory) == bytes_of(expected.state.memory)
    assert bytes_of(private) == bytes_of(expected_private)
    for a, b in zip(expected.rounds, found.rounds, strict=True):
        assert (a.metrics, a.cohort_size, a.evaluation) == (b.metrics, b.cohort_size, b.evaluation)


@pytest.mark.parametrize("method", METHODS)
def test_no_report_of_a_clean_run_is_rejected(method):
    result, _ = run_method(method)
    assert [r.rejected for r in result.rounds] == [{}] * 3
