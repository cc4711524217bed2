"""Personal models and heads of Ditto, FedPer and FedRep, computed by hand where the numbers are small."""

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


def run_method(data, name, model=MLP, fleet=PlainFleet, **kw):
    setting = {"rounds": 3, "cohort_size": 4, "batch_size": 8, "epochs": 2, "lr": 0.1, "momentum": 0.5} | kw
    fleet = fleet(data)
    return engine.run(
        build(name, Setting(model, **setting)), fleet, rounds=3, seed=0, central_samples=data.central
    ), fleet


def both(model=MLP, **kw):
    shared = LocalTraining(model, batch_size=1000)
    return TrainSharedAndPersonal(
        shared, replace(shared, start="own", sends_model=False, keeps_model=True, name="personal", **kw)
    )


def test_personal_model_is_pulled_towards_the_received_one():
    """Samples at x = 0, one of each class, give no gradient where biases are equal, so only the pull moves the slope.
    A step leaves 1 - lr mu = 0.8 of the gap, two steps 0.64: from slope 1 towards 3, 3 - 0.64 * 2 = 1.72."""
    task = Task({"global": line(3.0)}, {"lr": 0.5}, seed=0)
    program = both(LINEAR, mu=2.0, lr=0.1, epochs=2)
    report, private = run_program(program, task, client([0.0, 0.0], [0, 1]), {"model": line(1.0)})
    assert tree.max_abs_difference(private["model"], line(1.72)) < 1e-6
    assert tree.max_abs_difference(report.tensors["model"], line(3.0)) < 1e-6


def test_a_strong_pull_keeps_the_personal_model_at_the_received_one():
    """With lr mu = 1 a step ends lr times the gradient away from it, wherever it began."""
    received, far = MLP.init(0), MLP.init(1)
    _, private = run_program(both(lr=1e-4, mu=1e4), Task({"global": received}), DATA, {"model": far})
    assert tree.max_abs_difference(received, far) > 0.1
    assert tree.max_abs_difference(private["model"], received) < 1e-3


def test_without_a_pull_the_personal_model_is_trained_alone():
    own = {"model": MLP.init(1)}
    _, private = run_program(both(epochs=3), Task({"global": MLP.init(0)}), DATA, own)
    alone = LocalTraining(MLP, epochs=3, batch_size=1000, start="own", sends_model=False, keeps_model=True)
    _, expected = run_program(alone, Task({}), DATA, own)
    assert tree.max_abs_difference(private, expected) < 1e-6


@pytest.mark.parametrize("model", ["mlp-dropout", "linear"])
def test_the_global_model_of_ditto_is_that_of_fedavg(tiny, model):
    model = load_model(model, (6,), 4)
    base, _ = run_method(tiny, "fedavg", model)
    result, fleet = run_method(tiny, "ditto", model)
    assert tree.max_abs_difference(base.state.models, result.state.models) == 0
    assert base.accuracy["central"] == result.accuracy["central"]
    assert [(r.bytes_down, r.bytes_up) for r in base.rounds] == [(r.bytes_down, r.bytes_up) for r in result.rounds]
    assert tree.max_abs_difference(fleet.private["c0"]["model"], result.state.models["global"]) > 1e-2


def test_a_personal_model_starts_as_the_first_received_model(tiny):
    result, fleet = run_method(tiny, "ditto", cohort_size=6, options={"personal": {"epochs": 0}})
    first = build("ditto", Setting(MLP, rounds=3, cohort_size=6)).init(0).models["global"]
    assert tree.max_abs_difference(fleet.private["c2"]["model"], first) == 0
    assert tree.max_abs_difference(result.state.models["global"], first) > 1e-2


def test_personal_options_are_those_of_training_but_for_the_schedule():
    options = {"train": {"epochs": 7, "clip": 2.0, "schedule": "cosine"}, "personal": {"lr": 0.02}}
    program = build("ditto", Setting(MLP, rounds=3, cohort_size=1, options=options)).stages[-1].program
    assert (program.personal.epochs, program.personal.clip, program.personal.mu) == (7, 2.0, 0.1)
    state = program.begin(Task({"global": MLP.init(0)}, {"lr": 0.01}), {})
    assert (float(state["shared"]["lr"]), float(state["personal"]["lr"])) == pytest.approx((0.01, 0.02))


TWO = Model("two", lambda: nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), (1,), 2)
BASE, HEAD = {"0.weight": torch.tensor([[2.0]])}, {"1.weight": torch.tensor([[1.0], [-1.0]])}


def parts_after_one_step(kind, **kw):
    """One sample x = 1 of class 0, base a = 2, head (h, -h) with h = 1: logits are (a h, -a h). With q = P(class 1) =
    1 / (1 + exp(2 a h)) the gradient of the loss is -2 h q in a and -+a q in the head."""
    program = kind(LocalTraining(TWO), **kw)
    report, private = run_program(program, Task({"base": BASE}, {"lr": 1.0}), client([1.0], [0]), {"head": HEAD})
    assert set(report.tensors["model"]) == set(BASE)
    assert set(private) == {"head"}
    head = private["head"]["1.weight"].squeeze(1).tolist()
    assert head[0] == pytest.approx(-head[1])
    return float(report.tensors["model"]["0.weight"]), head[0]


def test_base_and_head_are_trained_jointly():
    q = 1 / (1 + math.exp(4))
    assert parts_after_one_step(KeepHead) == pytest.approx((2 + 2 * q, 1 + 2 * q))


def test_the_head_is_trained_before_the_base():
    h = 1 + 2 / (1 + math.exp(4))
    q = 1 / (1 + math.exp(4 * h))  # with the new head on the old base
    assert parts_after_one_step(TrainHeadThenBase, head_epochs=1) == pytest.approx((2 + 2 * h * q, h))


def test_each_phase_changes_only_the_part_that_it_trains():
    federation = tiny_federation(2, shape=(1, 6, 6))
    model = load_model("networks:SmallBatchNorm", (1, 6, 6), 4)
    base, head = model.split_base_and_head(model.init(0))
    assert set(head) == {"4.weight", "4.bias"}
    assert {"0.weight", "1.weight", "1.running_mean", "1.num_batches_tracked"} <= set(base)

    def changed(head_epochs, epochs):
        program = TrainHeadThenBase(LocalTraining(model, epochs=epochs, batch_size=4), head_epochs=head_epochs)
        report, private = run_program(program, Task({"base": base}, {"lr": 0.1}), federation["c1"], {"head": head})
        trained = report.tensors["model"] | private["head"]
        return {k for k, v in (base | head).items() if not torch.equal(v, trained[k])} - {"0.bias"}

    base_names = set(base) - {"0.bias"}  # has no gradient, because batch norm subtracts every constant
    assert changed(0, 0) == set()
    assert changed(2, 0) == set(head)
    assert changed(0, 2) == base_names
    assert changed(1, 1) == base_names | set(head)


def test_gradients_are_computed_for_the_trained_part_only():
    """Operations per sample of 6-64-30-4, two for each product: forward 2 (384 + 1920 + 120) = 4848. Gradients
    of the head's weights: 240. Gradients of the other weights: 2 (384 + 1920) = 4608, and back through head and second
    layer 2 (120 + 1920) = 4080."""
    base, head = MLP.split_base_and_head(MLP.init(0))
    num_samples = len(DATA["train"].y)

    def flops(program):
        return run_program(program, Task({"base": base}), DATA, {"head": head})[0].flops / num_samples

    assert flops(TrainHeadThenBase(LocalTraining(MLP, epochs=0), head_epochs=1)) == 4848 + 240
    assert flops(TrainHeadThenBase(LocalTraining(MLP, epochs=1), head_epochs=0)) == 4848 + 4608 + 4080
    assert flops(KeepHead(LocalTraining(MLP, epochs=1))) == 4848 + 240 + 4608 + 4080


def test_the_first_head_follows_from_the_seed_and_training_continues_from_it():
    base, _ = MLP.split_base_and_head(MLP.init(0))
    task = Task({"base": base}, {"lr": 0.1, "first": 9.0})
    idle = KeepHead(LocalTraining(MLP, epochs=0))
    _, first = run_program(idle, task, DATA, {})
    assert tree.max_abs_difference(first["head"], MLP.split_base_and_head(MLP.init(9))[1]) == 0
    _, later = run_program(KeepHead(LocalTraining(MLP)), task, DATA, first)
    _, unchanged = run_program(idle, task, DATA, later)
    assert tree.max_abs_difference(later, first) > 1e-3
    assert tree.max_abs_difference(unchanged, later) == 0


class Bypassed(nn.Module):
    """A model whose base has no effect and is never changed, so that only the head learns."""

    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(x + 0 * self.base(x))


def test_with_everything_in_the_head_clients_are_alone(tiny):
    model = Model("bypassed", Bypassed, (6,), 4)
    shared, fleet = run_method(tiny, "fedper", model)
    alone, reference = run_method(tiny, "local", model)
    assert set(fleet.private) == set(reference.private)
    for c, private in fleet.private.items():
        assert (
            tree.max_abs_difference(private["head"], model.split_base_and_head(reference.private[c]["model"])[1]) == 0
        )
    assert shared.accuracy["local"] == alone.accuracy["local"]


class RecordingFleet(PlainFleet):
    """Keeps every message as it would be sent, and every head that a client has had."""

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
    result, fleet = run_method(tiny, name, fleet=RecordingFleet)
    first = result.state.memory["train"]["head"]
    base = build(name, Setting(MLP, rounds=3, cohort_size=4)).init(0).models["base"]
    assert len(fleet.heads) > 12
    assert {program for program, _ in fleet.messages} == {"train", "evaluate"}
    assert contains(next(m for program, m in fleet.messages if program == "train"), base)  # tensors can be result
    for program, message in fleet.messages:
        assert not any(contains(message, head) for head in fleet.heads)
        assert program == "evaluate" or not contains(message, first)


@pytest.mark.parametrize("name", HEADED)
def test_the_ledger_shows_that_heads_stay(tiny, name):
    """A head of 30 x 4 + 4 numbers of 4 bytes is 496 bytes, and its entry in the header. Instead of the
    head, the seed of the first head is sent, in 8 bytes and its name."""
    fedavg, _ = run_method(tiny, "fedavg")
    result, _ = run_method(tiny, name)
    for a, b in zip(fedavg.rounds, result.rounds, strict=True):
        assert a.bytes_up - b.bytes_up >= 4 * 496
        assert a.bytes_down - b.bytes_down >= 4 * (496 - 8)


@pytest.mark.parametrize("name", HEADED)
def test_a_client_that_never_trained_uses_the_first_head(tiny, name):
    result, fleet = run_method(tiny, name, cohort_size=1)
    method = build(name, Setting(MLP, rounds=3, cohort_size=1))
    assert 0 < len(fleet.private) < len(tiny)
    models, x = method.models_for(result.state, None), tiny.central.x
    first = MLP.split_base_and_head(method.init(0).models["base"] | method.init(0).memory["train"]["head"])[1]
    assert torch.equal(method.predict(models, {}, x), MLP.predict(result.state.models["base"] | first, x))
    private = next(iter(fleet.private.values()))
    own = MLP.predict(result.state.models["base"] | private["head"], x)
    assert torch.equal(method.predict(models, private, x), own)
    assert not torch.equal(method.predict(models, {}, x), own)


def test_bases_are_weighted_by_samples_by_default(tiny):
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
        (
            "fedper",
            LINEAR,
            {},
            "model linear has one layer only; it must have two or more, since clients share all but",
        ),
        ("fedrep", LINEAR, {}, "model linear has one layer only"),
        ("ditto", MLP, {"personal": {"mu": -1}}, r"personal\.mu is -1; it must be 0 or more"),
    ],
)
def test_bad_input(name, model, options, message):
    with pytest.raises(UserError, match=message):
        build(name, Setting(model, rounds=3, cohort_size=1, options=options))
