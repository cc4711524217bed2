from dataclasses import replace

import pytest
import torch

from shoal import engine
from shoal.client.evaluate import Evaluate
from shoal.cost.devices import PROFILES
from shoal.cost.ledger import Ledger
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import CENTRALISED_CLIENT, Method, Samples, ServerState, Task


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 4, "cohort_size": 3, "batch_size": 8} | kw)


class UnresponsiveFleet(PlainFleet):
    """A fleet in which some clients do not respond."""

    def __init__(self, data, unresponsive):
        super().__init__(data)
        self.unresponsive = unresponsive

    def execute(self, plan):
        return {c: r for c, r in super().execute(plan).items() if c not in self.unresponsive}


def test_evaluates_every_n_rounds_and_the_last(tiny):
    method = build("fedavg", setting(rounds=5))
    result = engine.run(method, PlainFleet(tiny), rounds=5, seed=0, central_samples=tiny.central, eval_every=2)
    assert [r.round for r in result.rounds if r.evaluation] == [2, 4, 5]
    assert [r.round for r in result.rounds] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "local"])
def test_a_round_without_reports_changes_nothing(tiny, name):
    method = build(name, setting())
    result = engine.run(method, UnresponsiveFleet(tiny, set(tiny)), rounds=4, seed=0, central_samples=tiny.central)
    assert result.state.round == 4
    first = method.init(0)
    assert torch.equal(result.state.models["global"]["fc1.weight"], first.models["global"]["fc1.weight"])
    assert result.rounds[-1].bytes_up == 0
    assert result.rounds[-1].bytes_down > 0
    assert result.accuracy["local"] is None
    assert result.accuracy["central"] is not None


def test_clients_that_did_not_respond_count_for_the_downlink_only(tiny):
    method = build("fedavg", setting(cohort_size=6))
    result = engine.run(method, UnresponsiveFleet(tiny, {"c1"}), rounds=1, seed=0)
    (entry,) = result.ledger.entries
    up = dict(zip(entry.clients, entry.bytes_up.tolist(), strict=True))
    assert up["c1"] == 0
    assert up["c0"] == up["c5"] > 4 * 824  # 6*64+64 + 64*30+30 + 30*4+4 parameters are 2,522 floats
    assert result.rounds[0].bytes_up == sum(up.values())
    assert set(result.evaluation.clients) == set(tiny) - {"c1"}


def test_evaluation_by_hand():
    """The logits predict class 1 for positive inputs, so 3 of 4 predictions are right."""
    x = torch.tensor([[1.0], [2.0], [-1.0], [-3.0]])
    y = torch.tensor([1, 0, 0, 0])
    data = {"a": {"train": Samples(x, y), "val": Samples(x, y), "test": Samples(x, y)}}

    def predict(models, private, x):
        return torch.cat([-x, x], 1)

    method = Method("hand", lambda s: ServerState(0, {}), (), lambda s, c: {}, predict, 2)
    evaluation = engine.evaluate(
        method, PlainFleet(data), ServerState(0, {}), engine.CentralTestEvaluator(Samples(x[:1], y[:1]))
    )
    assert evaluation.clients["a"].accuracy == 0.75
    assert evaluation.clients["a"].num_samples == 4
    # class 0: 2 hits, 2 predicted, 3 actual; class 1: 1 hit, 2 predicted, 1 actual
    assert evaluation.clients["a"].f1 == pytest.approx((4 / 5 + 2 / 3) / 2)
    expected = sum(torch.log1p(torch.exp(torch.tensor(2.0 * m))).item() for m in (-1, 2, -1, -3)) / 4
    assert evaluation.clients["a"].loss == pytest.approx(expected, rel=1e-6)
    assert evaluation.central is not None
    assert evaluation.central.accuracy == 1.0


def test_only_evaluation_opens_the_test_split():
    for name in ("fedavg", "fedprox", "fedavg-ft", "local", "centralised"):
        for program in build(name, setting()).programs.values():
            assert all(phase.split != "test" for phase in program.phases)


def test_central_is_what_an_inference_only_client_sees(tiny):
    method = build("fedavg-ft", setting())
    served_clients = []

    def models_for(state, client):
        served_clients.append(client)
        return method.models_for(state, client)

    engine.evaluate(
        replace(method, models_for=models_for),
        PlainFleet(tiny),
        method.init(0),
        engine.CentralTestEvaluator(tiny.central),
    )
    assert served_clients == [*tiny, None]


def test_divergence_stops_the_run(tiny):
    method = build("fedavg", setting(lr=1e9, epochs=5))
    with pytest.raises(UserError, match=r"are not finite; a smaller --lr"):
        engine.run(method, PlainFleet(tiny), rounds=4, seed=0)


def test_centralised_training_sends_no_bytes(tiny):
    result = engine.run(build("centralised", setting()), PlainFleet(tiny), rounds=1, seed=0)
    (entry,) = result.ledger.entries
    assert (entry.clients, entry.bytes_down.tolist(), entry.bytes_up.tolist()) == ((CENTRALISED_CLIENT,), [0], [0])
    assert entry.compute_joules[0] == entry.flops[0] / PROFILES["server"].flops_per_s * PROFILES["server"].active_w
    pooled = tiny[CENTRALISED_CLIENT]["train"]
    assert len(pooled.y) == sum(len(tiny[c]["train"].y) for c in tiny)


def test_training_loss_is_a_mean_over_samples(tiny):
    result = engine.run(build("fedavg", setting(cohort_size=6, lr=1e-9)), PlainFleet(tiny), rounds=1, seed=0)
    method = build("fedavg", setting())
    program = Evaluate(method.predict, 4, split="train")
    fleet = PlainFleet(tiny)
    models = method.models_for(method.init(0), None)
    pairs = [fleet.execute_one(program, c, Task(models)).metrics["loss"] for c in tiny]
    expected = sum(s for s, _ in pairs) / sum(n for _, n in pairs)
    assert result.rounds[0].metrics["train.loss"] == pytest.approx(expected, rel=1e-4)


def test_settings_without_effect_in_a_run_in_memory_are_refused(tiny):
    import shoal

    with pytest.raises(UserError, match=r"clients is 77, but shoal\.run gets a federation"):
        shoal.run("fedavg", tiny, clients=77)
    with pytest.raises(UserError, match=r"measure is 'codecarbon', but shoal.run measures no energy"):
        shoal.run("fedavg", tiny, measure="codecarbon")


def test_one_test_sample_is_evaluated_with_batch_norm_too():
    from federations import tiny_federation

    federation = tiny_federation(2, (1, 6, 6))
    data = {c: dict(federation[c]) for c in federation}
    data["c0"]["test"] = Samples(*(part[:1] for part in data["c0"]["test"]))
    method = build("fedavg", setting(model=load_model("networks:SmallBatchNorm", (1, 6, 6), 4)))
    central_evaluator = engine.CentralTestEvaluator(Samples(*(p[:1] for p in federation.central)))
    evaluation = engine.evaluate(method, PlainFleet(data), method.init(0), central_evaluator)
    assert evaluation.clients["c0"].num_samples == 1
    assert evaluation.central is not None


def test_a_client_is_in_its_largest_cluster_and_in_those_of_more_than_half():
    membership = {"c1": [0.0, 1.0, 1.0], "c0": [0.4, 0.3, 0.3], "c2": [0.6, 0.4, 0.0]}
    state = ServerState(1, {k: {} for k in "zam"}, {c: torch.tensor(w) for c, w in membership.items()})
    result = engine.Result(state, [], Ledger(), 0.0, 0.0)
    assert result.clusters == {"c0": ["a"], "c1": ["m", "z"], "c2": ["a"]}
    assert list(result.clusters) == ["c0", "c1", "c2"]
    assert replace(result, state=replace(state, membership={})).clusters == {}
