"""Models and heads that clients keep (Ditto, FedPer, FedRep), worked out by hand where the numbers are small."""

import math
from dataclasses import replace

import pytest
import torch
from federations import tiny_federation
from torch import nn

from shoal import engine, tree
from shoal.client.personal_models import KeepHead, TrainHeadThenBase, TrainSharedAndPersonal
from shoal.client.train import LocalTraining
from shoal.codec import encode_report, encode_task
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet, run_program
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.models.model import Model
from shoal.types import Samples, Task

LINEAR = load_model("linear", (1,), 2)
MLP = load_model("mlp", (6,), 4)
DATA = tiny_federation()["c3"]
HEADED = {"fedper": KeepHead, "fedrep": TrainHeadThenBase}


def line(slope):
    return {"head.bias": torch.zeros(2), "head.weight": torch.tensor([[slope], [-slope]])}


def client(x, y):
    return dict.fromkeys(("train", "val", "test"), Samples(torch.tensor(x)[:, None], torch.tensor(y)))


def ends(data, name, model=MLP, fleet=PlainFleet, **kw):
    setting = {"rounds": 3, "cohort": 4, "batch_size": 8, "epochs": 2, "lr": 0.1, "momentum": 0.5} | kw
    fleet = fleet(data)
    return engine.run(
        build(name, Setting(model, **setting)), fleet, rounds=3, seed=0, central_samples=data.central
    ), fleet


def both(model=MLP, **kw):
    shared = LocalTraining(model, batch_size=1000)
    return TrainSharedAndPersonal(
        shared, replace(shared, start="own", sends_model=False, keeps_model=True, name="personal", **kw)
    )


def test_own_model_is_pulled_towards_the_received_one():
    """Rows at x = 0, one of each class, give no gradient where biases are equal: only the pull moves the slope. A step
    leaves 1 - lr mu = 0.8 of the gap, two steps 0.64: from slope 1 towards 3, 3 - 0.64 * 2 = 1.72."""
    task = Task({"global": line(3.0)}, {"lr": 0.5}, seed=0)
    program = both(LINEAR, mu=2.0, lr=0.1, epochs=2)
    report, private = run_program(program, task, client([0.0, 0.0], [0, 1]), {"model": line(1.0)})
    assert tree.max_abs_difference(private["model"], line(1.72)) < 1e-6
    assert tree.max_abs_difference(report.tensors["model"], line(3.0)) < 1e-6


def test_a_strong_pull_keeps_the_own_model_at_the_received_one():
    """With lr mu = 1 a step ends lr times the gradient away from it, wherever it began."""
    received, far = MLP.init(0), MLP.init(1)
    _, private = run_program(both(lr=1e-4, mu=1e4), Task({"global": received}), DATA, {"model": far})
    assert tree.max_abs_difference(received, far) > 0.1
    assert tree.max_abs_difference(private["model"], received) < 1e-3


def test_without_a_pull_the_own_model_is_trained_alone():
    own = {"model": MLP.init(1)}
    _, private = run_program(both(epochs=3), Task({"global": MLP.init(0)}), DATA, own)
    alone = LocalTraining(MLP, epochs=3, batch_size=1000, start="own", sends_model=False, keeps_model=True)
    _, expected = run_program(alone, Task({}), DATA, own)
    assert tree.max_abs_difference(private, expected) < 1e-6


@pytest.mark.parametrize("model", ["mlp-dropout", "linear"])
def test_the_global_model_of_ditto_is_that_of_fedavg(tiny, model):
    model = load_model(model, (6,), 4)
    base, _ = ends(tiny, "fedavg", model)
    found, fleet = ends(tiny, "ditto", model)
    assert tree.max_abs_difference(base.state.models, found.state.models) == 0
    assert base.accuracy["central"] == found.accuracy["central"]
    assert [(r.bytes_down, r.bytes_up) for r in base.rounds] == [(r.bytes_down, r.bytes_up) for r in found.rounds]
    assert tree.max_abs_difference(fleet.private["c0"]["model"], found.state.models["global"]) > 1e-2


def test_an_own_model_starts_as_the_first_one_received(tiny):
    found, fleet = ends(tiny, "ditto", cohort=6, options={"personal": {"epochs": 0}})
    first = build("ditto", Setting(MLP, rounds=3, cohort_size=6)).init(0).models["global"]
    assert tree.max_abs_difference(fleet.private["c2"]["model"], first) == 0
    assert tree.max_abs_difference(found.state.models["global"], first) > 1e-2


def test_personal_options_are_those_of_training_but_for_the_schedule():
    options = {"train": {"epochs": 7, "clip": 2.0, "schedule": "cosine"}, "personal": {"lr": 0.02}}
    program = build("ditto", Setting(MLP, rounds=3, cohort_size=1, options=options)).stages[-1].program
    assert (program.personal.epochs, program.personal.clip, program.personal.mu) == (7, 2.0, 0.1)
    s = program.begin(Task({"global": MLP.init(0)}, {"lr": 0.01}), {})
    assert (float(s["shared"]["lr"]), float(s["personal"]["lr"])) == pytest.approx((0.01, 0.02))


TWO = Model("two", lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), (1,), 2)
BASE, HEAD = {"0.weight": torch.tensor([[2.0]])}, {"1.weight": torch.tensor([[1.0], [-1.0]])}


def stepped(kind, **kw):
    """One row x = 1 of class 0, base a = 2, head (h, -h) with h = 1: logits are (a h, -a h). With q = P(class 1) =
    1 / (1 + exp(2 a h)) the slope of the loss is -2 h q in a and -+a q in the head."""
    program = kind(LocalTraining(TWO), **kw)
    report, private = run_program(program, Task({"base": BASE}, {"lr": 1.0}), client([1.0], [0]), {"head": HEAD})
    assert set(report.tensors["model"]) == set(BASE)
    assert set(private) == {"head"}
    head = private["head"]["1.weight"].squeeze(1).tolist()
    assert head[0] == pytest.approx(-head[1])
    return float(report.tensors["model"]["0.weight"]), head[0]


def test_base_and_head_are_trained_jointly():
    q = 1 / (1 + math.exp(4))
    assert stepped(KeepHead) == pytest.approx((2 + 2 * q, 1 + 2 * q))


def test_the_head_is_trained_before_the_base():
    h = 1 + 2 / (1 + math.exp(4))
    q = 1 / (1 + math.exp(4 * h))  # with the new head on the old base
    assert stepped(TrainHeadThenBase, head_epochs=1) == pytest.approx((2 + 2 * h * q, h))


def test_turns_change_only_their_part():
    federation = tiny_federation(2, shape=(1, 6, 6))
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    base, head = model.split_base_and_head(model.init(0))
    assert set(head) == {"4.weight", "4.bias"}
    assert {"0.weight", "1.weight", "1.running_mean", "1.num_batches_tracked"} <= set(base)

    def changed(head_epochs, epochs):
        program = TrainHeadThenBase(LocalTraining(model, epochs=epochs, batch_size=4), head_epochs=head_epochs)
        report, private = run_program(program, Task({"base": base}, {"lr": 0.1}), federation["c1"], {"head": head})
        now = report.tensors["model"] | private["head"]
        return {k for k, v in (base | head).items() if not torch.equal(v, now[k])} - {"0.bias"}

    without = set(base) - {"0.bias"}  # which has no slope: batch norm takes every constant away
    assert changed(0, 0) == set()
    assert changed(2, 0) == set(head)
    assert changed(0, 2) == without
    assert changed(1, 1) == without | set(head)


def test_slopes_are_computed_of_the_trained_part_only():
    """Operations per row of 6-64-30-4, two for each product: forward 2 (384 + 1920 + 120) = 4848. Slopes of the
    head's weights: 240. Slopes of the other weights: 2 (384 + 1920) = 4608, and down to there through head and second
    layer 2 (120 + 1920) = 4080."""
    base, head = MLP.split_base_and_head(MLP.init(0))
    rows = len(DATA["train"].y)

    def flops(program):
        return run_program(program, Task({"base": base}), DATA, {"head": head})[0].flops / rows

    assert flops(TrainHeadThenBase(LocalTraining(MLP, epochs=0), head_epochs=1)) == 4848 + 240
    assert flops(TrainHeadThenBase(LocalTraining(MLP, epochs=1), head_epochs=0)) == 4848 + 4608 + 4080
    assert flops(KeepHead(LocalTraining(MLP, epochs=1))) == 4848 + 240 + 4608 + 4080


def test_the_first_head_follows_from_the_seed_and_later_ones_go_on():
    base, _ = MLP.split_base_and_head(MLP.init(0))
    task = Task({"base": base}, {"lr": 0.1, "first": 9.0})
    idle = KeepHead(LocalTraining(MLP, epochs=0))
    _, first = run_program(idle, task, DATA, {})
    assert tree.max_abs_difference(first["head"], MLP.split_base_and_head(MLP.init(9))[1]) == 0
    _, later = run_program(KeepHead(LocalTraining(MLP)), task, DATA, first)
    _, same = run_program(idle, task, DATA, later)
    assert tree.max_abs_difference(later, first) > 1e-3
    assert tree.max_abs_difference(same, later) == 0


class Bypassed(nn.Module):
    """Its base changes nothing, and is not changed: all that is learned is in the head."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(x + 0 * self.base(x))


def test_with_everything_in_the_head_clients_are_alone(tiny):
    model = Model("bypassed", Bypassed, (6,), 4)
    shared, fleet = ends(tiny, "fedper", model)
    alone, reference = ends(tiny, "local", model)
    assert set(fleet.private) == set(reference.private)
    for c, private in fleet.private.items():
        assert (
            tree.max_abs_difference(private["head"], model.split_base_and_head(reference.private[c]["model"])[1]) == 0
        )
    assert shared.accuracy["mean"] == alone.accuracy["mean"]


class Overheard(PlainFleet):
    """Keeps every message as it would travel, and every head that a client ever had."""

    def __init__(self, data):
        super().__init__(data)
        self.messages, self.heads = [], []

    def execute(self, plan):
        reports = super().execute(plan)
        sent = [encode_task(t) for t in plan.tasks.values()] + [encode_report(r) for r in reports.values()]
        self.messages += [(plan.program.name, message) for message in sent]
        self.heads += [p["head"] for p in self.private.values()]
        return reports


def contains(message, model):
    return any(x.numpy().tobytes() in message for x in model.values())


@pytest.mark.parametrize("name", HEADED)
def test_no_head_is_ever_sent(tiny, name):
    result, fleet = ends(tiny, name, fleet=Overheard)
    first = result.state.memory["train"]["head"]
    base = build(name, Setting(MLP, rounds=3, cohort_size=4)).init(0).models["base"]
    assert len(fleet.heads) > 12
    assert {program for program, _ in fleet.messages} == {"train", "evaluate"}
    assert contains(next(m for program, m in fleet.messages if program == "train"), base)  # tensors can be found
    for program, message in fleet.messages:
        assert not any(contains(message, head) for head in fleet.heads)
        assert program == "evaluate" or not contains(message, first)


@pytest.mark.parametrize("name", HEADED)
def test_the_ledger_shows_that_heads_stay(tiny, name):
    """A head of 30 x 4 + 4 numbers of 4 bytes is 496 bytes, and what the header says of it; the seed of the first
    head is sent instead, in 8 bytes and its name."""
    whole, _ = ends(tiny, "fedavg")
    found, _ = ends(tiny, name)
    for a, b in zip(whole.rounds, found.rounds, strict=True):
        assert a.bytes_up - b.bytes_up >= 4 * 496
        assert a.bytes_down - b.bytes_down >= 4 * (496 - 8)


@pytest.mark.parametrize("name", HEADED)
def test_who_never_trained_is_served_the_first_head(tiny, name):
    result, fleet = ends(tiny, name, cohort=1)
    method = build(name, Setting(MLP, rounds=3, cohort_size=1))
    assert 0 < len(fleet.private) < len(tiny)
    models, x = method.models_for(result.state, None), tiny.central.x
    first = MLP.split_base_and_head(method.init(0).models["base"] | method.init(0).memory["train"]["head"])[1]
    assert torch.equal(method.predict(models, {}, x), MLP.predict(result.state.models["base"] | first, x))
    private = next(iter(fleet.private.values()))
    own = MLP.predict(result.state.models["base"] | private["head"], x)
    assert torch.equal(method.predict(models, private, x), own)
    assert not torch.equal(method.predict(models, {}, x), own)


def test_bases_are_weighted_by_rows_unless_told_otherwise(tiny):
    """Two clients, one round: the mean of what each sends when it is alone."""
    pair = ("c0", "c5")

    def base(clients, weighting):
        data = tiny_federation()
        setting = Setting(MLP, rounds=1, cohort_size=2, options={"train": {"weighting": weighting}})
        fleet = PlainFleet({c: data[c] for c in clients})
        return engine.run(build("fedper", setting), fleet, rounds=1, seed=0).state.models["base"]

    parts = [base((c,), "size") for c in pair]
    sizes = [len(tiny[c]["train"].y) for c in pair]
    assert tree.max_abs_difference(base(pair, "size"), tree.weighted_mean(parts, sizes)) < 1e-6
    assert tree.max_abs_difference(base(pair, "uniform"), tree.weighted_mean(parts, [1, 1])) < 1e-6


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    [
        ("fedrep", MLP, {"train": {"head_epochs": -1}}, r"train\.head_epochs is -1; it must be 0 or more"),
        ("fedper", MLP, {"train": {"head_epochs": 1}}, r"option train\.head_epochs is not known to method fedper"),
        ("fedper", LINEAR, {}, "model linear has one layer only; it must have another, which clients share"),
        ("fedrep", LINEAR, {}, "model linear has one layer only"),
        ("ditto", MLP, {"personal": {"mu": -1}}, r"personal\.mu is -1; it must be 0 or more"),
    ],
)
def test_bad_input(name, model, options, message):
    with pytest.raises(UserError, match=message):
        build(name, Setting(model, rounds=3, cohort_size=1, options=options))
