"""What APCSMA does on real data, as far as a few rounds show it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import engine
from shoal.client_table import ClientTable
from shoal.data import load, partition
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.selectors.contribution import lognorm, metrics
from shoal.stages.contribution import Coefficients
from shoal.stages.vectors import unflatten_params
from shoal.types import Report, Samples

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def fashion():
    return partition(
        load("fashion-mnist", seed=0, max_train_samples=10_000), "dirichlet:0.1", clients=50, seed=0, public_samples=200
    )


@pytest.fixture(scope="module")
def run_apcsma(fashion):
    def run(rounds, **options):
        model = load_model("mlp", fashion.input_shape, 10)
        setting = {"rounds": rounds, "cohort_size": 7, "epochs": 1, "batch_size": 64, "lr": 0.05}
        setting["public_samples"] = fashion.public_samples
        method = build("apcsma", Setting(model, **setting, options=options))
        return engine.run(method, VectorFleet(fashion), rounds=rounds, seed=0, eval_every=rounds), method

    return run


@pytest.fixture(scope="module")
def warm(run_apcsma):
    return run_apcsma(12)


def test_as_published_most_clients_never_take_part(run_apcsma, warm):
    """Coefficients learn to avoid clients that the first model represents. In a warm start all clients take part."""
    cold, _ = run_apcsma(20, select={"start": "cold"}, components={"conditional_update": False})
    participants = ClientTable.load(cold.state, "train")
    assert len(participants) < 25  # 7 random clients in each of 20 rounds would be 47 of 50
    assert float(participants["count"].max()) > 15  # some take part in nearly every round
    assert len(ClientTable.load(warm[0].state, "train")) == 50


def test_numbers_of_samples_decide_the_ranking(warm):
    """The column of sample numbers is linear and the others are logarithms, so sample numbers have the widest range."""
    reported = ClientTable.load(warm[0].state, "train")
    columns = 50 * metrics(*(reported[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
    spread = columns.max(0) / columns.min(0)
    assert spread[0] > 5
    assert (spread[[1, 2]] < spread[0] / 2).all()


def test_directions_hardly_differ(warm):
    """Cosines of base and head with the global model: their columns are nearly those of a plain mean."""
    result, method = warm
    train = next(s for s in method.stages if s.name == "train")
    reported = ClientTable.load(result.state, "train")
    model = result.state.models["global"]
    sent = [Report({"model": unflatten_params(row, model)}) for row in reported["model"]]
    for cosines in train._direction_cosines(model, sent).values():
        assert np.ptp(lognorm(cosines) * len(sent)) < 0.5


def test_public_samples_and_client_samples_give_the_same_coefficients(fashion, warm):
    """50 samples are enough, and they need not be samples of clients."""
    result, method = warm
    reported = ClientTable.load(result.state, "train")
    table = metrics(*(reported[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
    template, model = result.state.models["global"], method.stages[0].coefficients.model
    x, y = fashion.public_samples
    own = [fashion[c]["train"] for c in fashion]
    client_samples = Samples(torch.cat([e.x[:4] for e in own]), torch.cat([e.y[:4] for e in own]))
    sets = [Samples(x[:50], y[:50]), Samples(x, y), client_samples]
    learned = [Coefficients(model, samples).learn(table, reported["model"], template, result.state) for samples in sets]
    for other in learned[1:]:
        assert learned[0] == pytest.approx(other, abs=0.05)
    centre = replace(method.stages[0].coefficients, steps=0).learn(table, reported["model"], template, result.state)
    assert np.abs(learned[0] - centre).max() > 0.1
