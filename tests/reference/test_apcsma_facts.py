"""What APCSMA does on real data, as far as it can be told from a few rounds."""

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
def played(fashion):
    def play(rounds, **options):
        model = load_model("mlp", fashion.input_shape, 10)
        setting = {"rounds": rounds, "cohort": 7, "epochs": 1, "batch_size": 64, "lr": 0.05, "public": fashion.public}
        method = build("apcsma", Setting(model, **setting, options=options))
        return engine.run(method, VectorFleet(fashion), rounds=rounds, seed=0, eval_every=rounds), method

    return play


@pytest.fixture(scope="module")
def warm(played):
    return played(12)


def test_to_the_letter_most_clients_are_never_asked(played, warm):
    """Coefficients learn to avoid those who are represented by the first model. A warm start hears everybody."""
    cold, _ = played(20, select={"start": "cold"}, components={"conditional_update": False})
    asked = ClientTable.load(cold.state, "train")
    assert len(asked) < 25  # 7 by chance in each of 20 rounds would be 47 of 50
    assert float(asked["count"].max()) > 15  # some take part in nearly every round
    assert len(ClientTable.load(warm[0].state, "train")) == 50


def test_rows_of_data_decide_the_ranking(warm):
    """The column of rows is linear, the others are logarithms: times the number of clients, rows range widely."""
    known = ClientTable.load(warm[0].state, "train")
    columns = 50 * metrics(*(known[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
    spread = columns.max(0) / columns.min(0)
    assert spread[0] > 5
    assert (spread[[1, 2]] < spread[0] / 2).all()


def test_directions_are_hardly_told_apart(warm):
    """Cosines of base and head with the global model: their columns are nearly those of a plain mean."""
    result, method = warm
    train = next(s for s in method.stages if s.name == "train")
    known = ClientTable.load(result.state, "train")
    model = result.state.models["global"]
    sent = [Report({"model": unflatten_params(row, model)}) for row in known["model"]]
    for similar in train._alike(model, sent).values():
        assert np.ptp(lognorm(similar) * len(sent)) < 0.5


def test_public_rows_and_rows_of_clients_give_the_same_coefficients(fashion, warm):
    """50 rows suffice, and they need not be the clients' own."""
    result, method = warm
    known = ClientTable.load(result.state, "train")
    table = metrics(*(known[k].double().numpy() for k in ("size", "count", "accuracy", "loss")))
    like, model = result.state.models["global"], method.stages[0].coefficients.model
    x, y = fashion.public
    own = [fashion[c]["train"] for c in fashion]
    of_clients = Samples(torch.cat([e.x[:4] for e in own]), torch.cat([e.y[:4] for e in own]))
    sets = [Samples(x[:50], y[:50]), Samples(x, y), of_clients]
    found = [Coefficients(model, rows).learn(table, known["model"], like, result.state) for rows in sets]
    for other in found[1:]:
        assert found[0] == pytest.approx(other, abs=0.05)
    centre = replace(method.stages[0].coefficients, steps=0).learned(table, known["model"], like, result.state)
    assert np.abs(found[0] - centre).max() > 0.1
