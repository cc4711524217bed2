"""PM-MoE: heads of many clients on one base."""

from dataclasses import replace

import pytest
import torch
from federations import tiny_federation

from shoal import engine, tree
from shoal.client.gate import FitGate, Gate
from shoal.client.heads import MixHeads, SendHead, head_logits, mixed_heads_predict, stack_heads
from shoal.fleet.plain import PlainFleet, run_program
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.heads import GatherHeads, heads_for
from shoal.types import Report, ServerState, Task

MODEL = load_model("mlp", (6,), 4)
BASE, FIRST = MODEL.split_base_and_head(MODEL.init(0))


def head(seed):
    return MODEL.split_base_and_head(MODEL.init(seed))[1]


def state_with_heads_of(*clients):
    """Returns the server's state after these clients reported the heads of seeds 1, 2, ..."""
    state = ServerState(0, {"base": BASE}, memory={"train": {"head": FIRST}})
    reports = {c: Report({"head": head(k)}) for k, c in enumerate(clients, start=1)}
    return GatherHeads(SendHead(), 9, 1).fold(state, reports, 0)


def test_stacked_heads_give_the_logits_of_each_head():
    heads = [head(k) for k in range(3)]
    others = {k: torch.stack([h[k] for h in heads[1:]]) for k in FIRST}
    x = torch.randn(5, 6)
    logits = head_logits(MODEL, BASE, stack_heads(heads[0], others), x)
    for k, h in enumerate(heads):
        assert torch.allclose(logits[:, k], MODEL.predict(BASE | h, x), atol=1e-6)


class TestServer:
    def test_a_client_is_sent_the_heads_of_others(self):
        state = state_with_heads_of("a", "b", "c")
        received = heads_for(state, "b")["heads"]
        for k in FIRST:
            assert torch.equal(received[k], torch.stack([head(1)[k], head(3)[k]]))
        assert tree.max_abs_difference(heads_for(state, "b")["head"], FIRST) == 0

    def test_a_client_without_a_head_of_its_own_is_sent_no_others(self):
        assert (
            set(heads_for(state_with_heads_of("a", "b"), "new"))
            == set(heads_for(state_with_heads_of("a", "b"), None))
            == {"base", "head"}
        )
        assert set(heads_for(state_with_heads_of("a"), "a")) == {"base", "head"}  # no other client has reported a head

    def test_the_last_head_of_a_client_that_did_not_respond_is_kept(self):
        state = state_with_heads_of("a", "b")
        after = GatherHeads(SendHead(), 9, 1).fold(state, {"a": Report({"head": head(9)}), "c": Report()}, 0)
        assert torch.equal(heads_for(after, "b")["heads"]["head.bias"][0], head(9)["head.bias"])
        assert torch.equal(heads_for(after, "a")["heads"]["head.bias"][0], head(2)["head.bias"])


class TestClient:
    fit = FitGate(MODEL, Gate(calibrate=False, denoise=True, shortlist=0), epochs=3)

    def test_a_client_sends_its_head_or_nothing(self, tiny):
        report, private = run_program(SendHead(), Task(), tiny["c0"], {"head": head(5)})
        assert tree.max_abs_difference(report.tensors["head"], head(5)) == 0
        assert private is None
        assert run_program(SendHead(), Task(), tiny["c0"], {})[0].tensors == {}

    def test_base_and_heads_are_frozen(self, tiny):
        models = {"base": BASE, "head": FIRST, "heads": {k: torch.stack([head(1)[k], head(2)[k]]) for k in FIRST}}
        report, private = run_program(MixHeads(self.fit), Task(models, {}, 3), tiny["c4"], {"head": head(7)})
        assert replace(report, flops=0) == Report()
        assert tree.max_abs_difference(private["head"], head(7)) == 0
        assert private["gate"]["bias2"].shape == (3,)
        assert private["gate"]["weight2"].any()

    def test_prediction_without_and_with_a_gate(self, tiny):
        predict, x = mixed_heads_predict(self.fit), tiny.central.x
        others = {"heads": {k: head(1)[k][None] for k in FIRST}}
        models = {"base": BASE, "head": FIRST}
        assert torch.equal(predict(models, {}, x), MODEL.predict(BASE | FIRST, x))
        own = {"head": head(7)}
        assert torch.equal(predict(models | others, own, x), MODEL.predict(BASE | head(7), x))  # no gate yet
        gate = {"gate": Gate().init(6, 2, 0)}
        both = torch.stack([MODEL.predict(BASE | h, x) for h in (head(7), head(1))], 1)
        confidence = torch.logsumexp(both, -1)
        # At first all heads have equal weights, except for heads that are less confident than the own one.
        mean = torch.where((confidence[:, 1] >= confidence[:, 0])[:, None], both.mean(1), both[:, 0])
        assert torch.allclose(predict(models | others, own | gate, x), mean, atol=1e-6)


@pytest.mark.parametrize("make_fleet", [PlainFleet, VectorFleet])
def test_a_run_in_which_some_clients_never_trained(make_fleet):
    federation = tiny_federation(8)
    method = build("pm-moe", Setting(MODEL, rounds=2, cohort_size=3, batch_size=8))
    fleet = make_fleet(federation)
    result = engine.run(method, fleet, rounds=2, seed=0)
    trained = {c for c, private in fleet.private.items() if "head" in private}
    assert set(result.evaluation.clients) == set(federation)
    heads = result.state.memory["heads"]["head"]
    assert 3 <= len(heads) < 8
    assert len(heads) <= len(trained)


def test_pfmoe_mixes_the_global_model_and_a_tuned_head(tiny):
    """The base is that of the global model, and the gate weighs two heads."""
    method = build("pfmoe", Setting(MODEL, rounds=2, cohort_size=6, batch_size=8))
    fleet = PlainFleet(tiny)
    result = engine.run(method, fleet, rounds=2, seed=0)
    base, last = MODEL.split_base_and_head(result.state.models["global"])
    for private in fleet.private.values():
        mine, tuned = MODEL.split_base_and_head(private["model"])
        assert tree.max_abs_difference(mine, base) == 0
        assert tree.max_abs_difference(tuned, last) > 0
        assert private["gate"]["bias2"].shape == (2,)
    fedavg = engine.run(
        build("fedavg", Setting(MODEL, rounds=2, cohort_size=6, batch_size=8)), PlainFleet(tiny), rounds=2, seed=0
    )
    assert tree.max_abs_difference(fedavg.state.models, result.state.models) == 0
