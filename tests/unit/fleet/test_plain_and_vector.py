import logging
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from shoal import tree
from shoal.client.train import LocalTraining
from shoal.fleet.plain import ClientError, PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.models import load_model
from shoal.types import Phase, Plan, Report, Task


class WithDropout(nn.Module):
    """A user's network that draws from the global generator: torch refuses to stack it."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.inside, self.drop, self.out = nn.Linear(input_shape[0], 8), nn.Dropout(0.5), nn.Linear(8, classes)

    def forward(self, x):
        return self.out(self.drop(self.inside(x).relu()))


def plan_for(model, clients, **kw):
    program = LocalTraining(model, epochs=2, batch_size=8, keeps_model=True, **kw)
    return Plan(program, {c: Task({"g": model.init(0)}, {"lr": 0.1}, seed=i) for i, c in enumerate(clients)})


def max_difference(a, b):
    return max(tree.max_abs_difference(a[c].tensors["model"], b[c].tensors["model"]) for c in a)


@pytest.mark.parametrize("width", [1, 2, 3, 128])
def test_stacking_never_changes_a_result(tiny, width):
    plan = plan_for(load_model("mlp-dropout", (6,), 4), tiny, momentum=0.5, clip=1.0)
    plain, vector = PlainFleet(tiny), VectorFleet(tiny, max_stack_clients=width)
    expected, found = plain.execute(plan), vector.execute(plan)
    assert max_difference(expected, found) < 1e-6
    assert tree.max_abs_difference(plain.private, vector.private) < 1e-6
    for c in expected:
        assert found[c].metrics["loss"] == pytest.approx(expected[c].metrics["loss"], rel=1e-5)


def test_other_clients_of_a_stack_do_not_matter(tiny):
    """A client gets the same result alone, with a larger client, and in another order."""
    model = load_model("mlp", (6,), 4)
    all_clients = plan_for(model, tiny)
    alone = Plan(all_clients.program, {"c1": all_clients.tasks["c1"]})
    backwards = Plan(all_clients.program, dict(reversed(all_clients.tasks.items())))
    a, b, c = (VectorFleet(tiny).execute(p)["c1"] for p in (all_clients, alone, backwards))
    assert max_difference({"c": a}, {"c": b}) < 1e-6
    assert max_difference({"c": a}, {"c": c}) < 1e-6


def test_a_split_without_samples_has_no_steps(tiny):
    @dataclass(frozen=True)
    class Count:
        name: str = "count"
        batchable: bool = True
        split: str = "val"

        @property
        def phases(self):
            return (Phase(self.split, 1, 4, lambda s, b: {"n": s["n"] + b.w.sum()}, lambda s: {"n": s["n"] * 10}),)

        def begin(self, task, private):
            return {"n": torch.tensor(0.0)}

        def end(self, task, state, counts):
            return Report({"n": state}, {}, counts), None

    data = {c: dict(tiny[c]) for c in tiny}
    data["c0"]["val"] = type(data["c0"]["val"])(data["c0"]["val"].x[:0], data["c0"]["val"].y[:0])
    plan = Plan(Count(), {c: Task() for c in data})
    for fleet in (PlainFleet(data), VectorFleet(data)):
        reports = fleet.execute(plan)
        assert reports["c0"].tensors["n"]["n"] == 0
        assert reports["c2"].tensors["n"]["n"] == 50  # five samples, times ten at the end of the phase


def test_a_program_that_cannot_be_stacked_runs_one_by_one_with_one_warning(tiny, caplog):
    model = load_model(f"{__name__}:WithDropout", (6,), 4)
    plan = plan_for(model, tiny)
    fleet = VectorFleet(tiny)
    with caplog.at_level(logging.WARNING):
        found = fleet.execute(plan)
        fleet.execute(plan)
    assert [r for r in caplog.messages if "client by client" in r] == caplog.messages
    assert len(caplog.messages) == 1
    assert max_difference(PlainFleet(tiny).execute(plan), found) == 0


def test_a_network_with_its_own_randomness_is_reproducible(tiny):
    model = load_model(f"{__name__}:WithDropout", (6,), 4)
    plan = plan_for(model, tiny)
    torch.manual_seed(5)
    first = PlainFleet(tiny).execute(plan)
    torch.manual_seed(6)
    assert max_difference(first, PlainFleet(tiny).execute(plan)) == 0


def test_batch_norm_is_never_padded(caplog):
    from federations import tiny_federation

    federation = tiny_federation(3, shape=(1, 8, 8))
    plan = plan_for(load_model("networks:SmallBatchNorm", (1, 8, 8), 4), federation)
    with caplog.at_level(logging.WARNING):
        found = VectorFleet(federation).execute(plan)
    assert "batch norm" in caplog.text
    assert max_difference(PlainFleet(federation).execute(plan), found) == 0


@dataclass(frozen=True)
class Broken:
    name: str = "broken"
    batchable: bool = True
    phases: tuple = field(default=())

    def begin(self, task, private):
        return {"n": torch.zeros(1)}

    def end(self, task, state, counts):
        if counts["train"] > 20:
            raise KeyError("weights")
        return Report({}, {}, counts), None


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
def test_an_error_names_the_client_and_the_program(tiny, fleet):
    with pytest.raises(ClientError, match="program 'broken' failed on client 'c2'"):
        fleet(tiny).execute(Plan(Broken(), {c: Task() for c in tiny}))
