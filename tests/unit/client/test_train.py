"""One client against PyTorch's own training loop, written out."""

import pytest
import torch
from federations import tiny_federation
from torch.nn import functional as F

from shoal import tree
from shoal.client.multi_model import TrainAllModels
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.fleet.batches import batch_indices, phase_seed
from shoal.fleet.plain import run_program
from shoal.models import load_model
from shoal.types import Task

DATA = tiny_federation()["c3"]
MODEL = load_model("mlp", (6,), 4)
TASK = Task({"global": MODEL.init(0)}, {"lr": 0.05}, seed=11)


def trained(**kw):
    return run_program(LocalTraining(MODEL, epochs=2, batch_size=8, **kw), TASK, DATA, {})


def by_torch(momentum=0.0, weight_decay=0.0, mu=0.0):
    net = MODEL._build_network(0)
    first = [p.detach().clone() for p in net.parameters()]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay)
    program = LocalTraining(MODEL, epochs=2, batch_size=8)
    for indices in batch_indices(len(DATA["train"].y), program.phases[0], phase_seed(TASK.seed, program.phases, 0)):
        indices = indices[indices >= 0]
        loss = F.cross_entropy(net(DATA["train"].x[indices]), DATA["train"].y[indices])
        loss = loss + mu / 2 * sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), first, strict=True))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {k: v.detach() for k, v in net.state_dict().items()}


@pytest.mark.parametrize("kw", [{}, {"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.01}, {"mu": 0.7}])
def test_agrees_with_a_loop_written_out(kw):
    report, private = trained(**kw)
    assert private is None
    assert tree.max_abs_difference(report.tensors["model"], by_torch(**kw)) < 1e-6


def test_the_proximal_pull_does_not_change_the_first_step():
    """The gradient of the pull is zero where training starts."""
    one = {"epochs": 1, "batch_size": 1000}
    a, _ = run_program(LocalTraining(MODEL, **one), TASK, DATA, {})
    b, _ = run_program(LocalTraining(MODEL, mu=10.0, **one), TASK, DATA, {})
    assert tree.max_abs_difference(a.tensors["model"], b.tensors["model"]) < 1e-7


def test_a_stronger_pull_stays_closer():
    def drift(mu):
        model = trained(mu=mu)[0].tensors["model"]
        return sum(float((model[k] - TASK.models["global"][k]).square().sum()) for k in model)

    assert drift(0.0) > drift(1.0) > drift(10.0)


def test_loss_is_reported_with_the_number_of_samples():
    report, _ = trained()
    total, num_samples = report.metrics["loss"]
    assert num_samples == 2 * len(DATA["train"].y)
    assert 0 < total / num_samples < 3
    assert report.counts == {split: len(DATA[split].y) for split in ("train", "val", "test")}


def test_a_model_that_is_kept_and_not_sent():
    report, private = trained(sends_model=False, keeps_model=True)
    assert report.tensors == {}
    assert private is not None
    assert tree.max_abs_difference(private["model"], by_torch()) < 1e-6


def test_training_of_a_personal_model_continues_where_it_ended():
    program = LocalTraining(MODEL, start="own", sends_model=False, keeps_model=True)
    task = Task({}, {"lr": 0.05, "first": 5.0}, seed=1)
    _, first = run_program(program, task, DATA, {})
    _, second = run_program(program, task, DATA, first)
    _, alone = run_program(
        LocalTraining(MODEL, start="received"), Task({"m": first["model"]}, {"lr": 0.05}, 1), DATA, {}
    )
    assert alone is None
    again, _ = run_program(LocalTraining(MODEL), Task({"m": first["model"]}, {"lr": 0.05}, seed=1), DATA, {})
    assert tree.max_abs_difference(second["model"], again.tensors["model"]) == 0


def test_batch_norm_trains_and_sends_its_buffers():
    federation = tiny_federation(2, shape=(1, 8, 8))
    model = load_model("networks:SmallBatchNorm", (1, 8, 8), 4)
    report, _ = run_program(
        LocalTraining(model, batch_size=4), Task({"g": model.init(0)}, {"lr": 0.01}), federation["c1"], {}
    )
    sent = report.tensors["model"]
    assert sent["1.num_batches_tracked"] == 4  # 16 samples in batches of 4
    assert set(sent) == set(model.init(0))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"epochs": -1}, r"train\.epochs is -1"),
        ({"batch_size": 0}, r"train\.batch_size is 0; it must be 1"),
        ({"lr": -0.1}, r"train\.lr is -0\.1; it must be 0 or more"),
    ],
)
def test_bad_numbers(bad, message):
    with pytest.raises(UserError, match=message):
        LocalTraining(MODEL, **bad)


@pytest.mark.parametrize("names", [("global", "expert"), ("expert", "global")])
def test_the_global_model_is_reported_as_the_model_in_any_order_of_received_models(names):
    """A transport sorts names, so the first model on one fleet need not be the first on another."""
    model, data = load_model("mlp", (6,), 4), tiny_federation(3)["c2"]
    first = {"global": model.init(1), "expert": model.init(2)}
    training = LocalTraining(model, batch_size=8)
    report, _ = run_program(TrainAllModels(training), Task({k: first[k] for k in names}, {}, 3), data, {})
    for name, reported_name in (("global", "model"), ("expert", "expert")):
        alone, _ = run_program(training, Task({name: first[name]}, {}, 3), data, {})
        assert all(torch.equal(report.tensors[reported_name][k], x) for k, x in alone.tensors["model"].items())
    assert report.tensors.keys() == {"model", "expert"}
