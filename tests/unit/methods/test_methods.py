import pytest
import torch

import shoal
from shoal import engine, tree
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.methods import METHODS, Setting, build, default_options, method_factory, summary
from shoal.models import load_model


def setting(**kw):
    return Setting(
        **{
            "model": load_model("linear", (6,), 4),
            "rounds": 3,
            "cohort_size": 6,
            "batch_size": 1000,
            "epochs": 1,
            "lr": 0.1,
        }
        | kw
    )


def run_method(tiny, name, **kw):
    method = build(name, setting(**kw))
    fleet = PlainFleet(tiny)
    return engine.run(method, fleet, rounds=3, seed=0, central_samples=tiny.central), fleet


def test_one_full_step_of_fedavg_is_one_step_on_the_pool(tiny):
    """With one full-batch step per client and weights by size, averaging is gradient descent on the union."""
    fed, _ = run_method(tiny, "fedavg")
    pool, _ = run_method(tiny, "centralised")
    assert tree.max_abs_difference(fed.state.models, pool.state.models) < 1e-6


def test_fedprox_without_pull_is_fedavg(tiny):
    kw = {"batch_size": 8, "epochs": 2}
    plain, _ = run_method(tiny, "fedavg", **kw)
    none, _ = run_method(tiny, "fedprox", options={"train": {"mu": 0.0}}, **kw)
    some, _ = run_method(tiny, "fedprox", **kw)
    assert tree.max_abs_difference(plain.state.models, none.state.models) == 0
    assert tree.max_abs_difference(plain.state.models, some.state.models) > 1e-4


def test_fine_tuning_starts_from_the_global_model_and_leaves_it_alone(tiny):
    base, _ = run_method(tiny, "fedavg")
    tuned, fleet = run_method(tiny, "fedavg-ft")
    assert tree.max_abs_difference(base.state.models, tuned.state.models) == 0
    assert set(fleet.private) == set(tiny)
    none, still = run_method(tiny, "fedavg-ft", options={"personalise": {"epochs": 0}})
    assert tree.max_abs_difference(still.private["c0"]["model"], dict(none.state.models["global"])) == 0
    assert none.accuracy == base.accuracy
    assert tuned.accuracy["local"] > base.accuracy["local"]
    assert tuned.accuracy["central"] == base.accuracy["central"]


def test_local_clients_start_equal_and_diverge(tiny):
    result, fleet = run_method(tiny, "local")
    first = build("local", setting()).init(0)
    assert tree.max_abs_difference(first.models, result.state.models) == 0
    assert tree.max_abs_difference(fleet.private["c0"], fleet.private["c1"]) > 1e-3
    assert all(p.bytes_down.max() < 1000 and p.bytes_up.max() < 1000 for p in result.ledger.entries)  # no model travels


def test_local_equals_training_alone_for_as_many_epochs(tiny):
    """Three rounds of one full-batch step are three steps of gradient descent, written out."""
    _, fleet = run_method(tiny, "local")
    model = load_model("linear", (6,), 4)
    w = {k: v.clone().requires_grad_() for k, v in build("local", setting()).init(0).models["global"].items()}
    x, y = tiny["c4"]["train"]
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model.predict(w, x), y)
        gradients = torch.autograd.grad(loss, list(w.values()))
        w = {k: (p - 0.1 * g).detach().requires_grad_() for (k, p), g in zip(w.items(), gradients, strict=True)}
    assert tree.max_abs_difference({k: v.detach() for k, v in w.items()}, fleet.private["c4"]["model"]) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_summary_and_options(name):
    assert len(summary(name)) > 30
    assert "train" in default_options(name)


def test_options_change_the_training():
    method = build(
        "fedprox", setting(options={"train": {"mu": 0.5, "clip": 2, "schedule": "cosine", "weighting": "uniform"}})
    )
    train = method.stages[1]
    assert (train.program.mu, train.program.clip) == (0.5, 2.0)
    assert (train.rate.schedule, train.weighting) == ("cosine", "uniform")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"train": {"muu": 1}},
            r"train\.muu is not known to method fedavg; did you mean train\.mu\? \(it takes train\.epochs",
        ),
        (
            {"trian": {"mu": 1}},
            r"trian\.mu is not known to method fedavg; did you mean train\.mu\? \(it takes select\.probability, t",
        ),
        ({"train": {"mu": "much"}}, r"option train\.mu is 'much': input should be a valid number"),
        ({"train": {"weighting": "none"}}, r"option train\.weighting is 'none': input should be 'size' or 'uniform'"),
        ({"train": {"sends_model": False}}, r"option train\.sends_model is not known"),
        ({"train": {"epochs": -3}}, r"train\.epochs is -3"),
    ],
)
def test_bad_options(bad, message):
    with pytest.raises(UserError, match=message):
        build("fedavg", setting(options=bad))


@pytest.mark.parametrize(("key", "value"), [("sensitivity", "low"), ("weighting", "uniform")])
def test_one_pool_of_data_has_no_sensitive_part_and_nothing_to_weight(key, value, tiny):
    with pytest.raises(UserError, match=f"train.{key} is not known to method centralised"):
        shoal.run("centralised", tiny, rounds=1, set={"train": {key: value}})


def test_unknown_method():
    with pytest.raises(UserError, match="method 'fedavgg' is not known; did you mean fedavg"):
        method_factory("fedavgg")
    with pytest.raises(UserError, match="cannot be imported"):
        method_factory("nowhere.at:all")


def test_methods_that_compare_on_validation_samples_require_them():
    fleet = shoal.partition(shoal.load("digits"), "iid", clients=4, seed=0, val_fraction=0.0)
    with pytest.raises(
        UserError, match=r"scmoe needs validation samples, but val_fraction is 0. .* --set train.validation_split=train"
    ):
        shoal.run("scmoe", fleet, rounds=1)
    with pytest.raises(
        UserError, match=r"pfmoe needs validation samples, but val_fraction is 0. Set --val-fraction above 0"
    ):
        shoal.run("pfmoe", fleet, rounds=1)
    assert shoal.run("scmoe", fleet, rounds=1, set={"train": {"validation_split": "train"}}).accuracy["local"] > 0
