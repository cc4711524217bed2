"""Facts about the plain methods on real data in the papers' settings."""

from __future__ import annotations

import pytest

import shoal
from shoal.data import Federation

pytestmark = pytest.mark.data
SETTING = {"cohort": 10, "epochs": 1, "batch_size": 64, "lr": 0.01, "momentum": 0.5, "model": "mlp-dropout", "seed": 0}


@pytest.fixture(scope="module")
def fashion() -> dict[str, Federation]:
    data = shoal.load("fashion-mnist")
    return {spec: shoal.partition(data, spec, clients=100, seed=0) for spec in ("groups:5,1.0", "dirichlet:0.1", "iid")}


def central(method, federation, rounds, **kw):
    result = shoal.run(method, federation, rounds=rounds, eval_every=rounds, **SETTING | kw)
    return result.accuracy["central"]


@pytest.mark.parametrize("spec", ["groups:5,1.0", "dirichlet:0.1"])
def test_centralised_above_fedavg_above_local_on_the_central_set(fashion, spec):
    pooled = central("centralised", fashion[spec], 2)
    averaged = central("fedavg", fashion[spec], 20)
    alone = central("local", fashion[spec], 2)
    assert pooled > averaged + 0.05
    assert averaged > alone + 0.1


def test_skew_costs_accuracy(fashion):
    """At equal rounds both kinds of label skew lie far below iid. One round does not decide which is worse,
    because accuracy varies by ten points from round to round."""
    accuracy = {spec: central("fedavg", fed, 20) for spec, fed in fashion.items()}
    assert accuracy["iid"] > max(accuracy["dirichlet:0.1"], accuracy["groups:5,1.0"]) + 0.05


def test_fine_tuning_wins_where_clients_differ(fashion):
    base = shoal.run("fedavg", fashion["groups:5,1.0"], rounds=10, eval_every=10, **SETTING)
    tuned = shoal.run("fedavg-ft", fashion["groups:5,1.0"], rounds=10, eval_every=10, **SETTING)
    assert tuned.accuracy["local"] > base.accuracy["local"] + 0.2
    assert tuned.accuracy["central"] == base.accuracy["central"]
