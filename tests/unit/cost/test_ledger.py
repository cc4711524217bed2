"""Numbers are worked out for the MLP of 6 inputs, 64, 30 and 4 classes: 384 + 1,920 + 120 multiply-adds per row."""

import numpy as np
import pytest
import torch
from quick import quick_options

from shoal import engine
from shoal.codec import encode_report, encode_task
from shoal.cost.costs import CostModel
from shoal.cost.devices import PROFILES
from shoal.cost.ledger import EDGE_CLOUD, Ledger, LedgerEntry, total_joules_by_part
from shoal.cost.links import LINKS
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import METHODS, Setting, build
from shoal.models import load_model

FORWARD = 2 * (6 * 64 + 64 * 30 + 30 * 4)
# Twice the forward pass for the gradients of weights and inputs; the first layer's inputs need none.
TRAINING = FORWARD + FORWARD + 2 * (64 * 30 + 30 * 4)


def setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 4, "cohort": 3, "batch_size": 8} | kw)


class Listening(PlainFleet):
    """Also weighs what would be sent."""

    def execute(self, plan):
        reports = super().execute(plan)
        self.sent = [
            (c, len(encode_task(t)), len(encode_report(reports[c])), plan.program.name) for c, t in plan.tasks.items()
        ]
        self.all = [*getattr(self, "all", []), *self.sent]
        return reports


def run(tiny, name="fedavg", fleet=None, rounds=2, costs=None, **kw):
    ledger = Ledger(costs or CostModel())
    fleet = fleet or PlainFleet(tiny)
    method = build(name, setting(rounds=rounds, **{"options": quick_options(name)} | kw))
    return engine.run(method, fleet, rounds=rounds, seed=0, ledger=ledger)


@pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
def test_work_is_counted_from_the_steps_that_were_run(tiny, fleet):
    result = run(tiny, fleet=fleet(tiny), epochs=3, cohort=6)
    page = result.ledger.entries[0]
    rows = [len(tiny[c]["train"].y) for c in page.clients]
    assert page.flops.tolist() == [3 * n * TRAINING for n in rows]


def test_a_probe_costs_a_forward_pass_only(tiny):
    result = run(tiny, "powerd", epochs=1, options={"select": {"candidates": 6}})
    probe = next(p for p in result.ledger.entries if p.stage == "select")
    assert probe.purpose == "pre"
    assert probe.flops.tolist() == [len(tiny[c]["train"].y) * FORWARD for c in probe.clients]


def test_convolutions_without_padding():
    from shoal.client.train import LocalTraining
    from shoal.fleet.flops import count_flops
    from shoal.types import Task

    model = load_model("cnn-cifar", (3, 32, 32), 10)
    program = LocalTraining(model)
    s = program.begin(Task({"global": model.init(0)}), {})
    work = count_flops(program.phases[0], s, torch.zeros(1, 3, 32, 32))
    # Multiply-adds of the convolutions on 30 x 30, 13 x 13, 4 x 4 outputs, then two dense layers.
    layers = [900 * 32 * 27, 169 * 64 * 288, 16 * 64 * 576, 256 * 64, 64 * 10]
    assert sum(layers) == 4_499_456
    assert work.per_sample == 2 * (3 * sum(layers) - layers[0])
    assert (work.per_step, work.at_end) == (0, 0)


def test_seconds_and_joules_follow_from_device_and_link(tiny):
    slow, fast = PROFILES["microcontroller"], PROFILES["jetson"]
    costs = CostModel(profiles={"c0": slow}, default_profile=fast, link=LINKS["ethernet"])
    page = run(tiny, cohort=6, costs=costs).ledger.entries[0]
    place = page.clients.index("c0")
    for i, profile in ((place, slow), (place + 1, fast)):
        assert page.compute_s[i] == pytest.approx(page.flops[i] / profile.flops_per_s)
        assert page.compute_joules[i] == pytest.approx(page.compute_s[i] * profile.active_w)
        down, up = LINKS["ethernet"].download(int(page.bytes_down[i])), LINKS["ethernet"].upload(int(page.bytes_up[i]))
        assert page.radio_s[i] == pytest.approx(down.seconds + up.seconds)
        assert page.radio_joules[i] == pytest.approx(down.joules + up.joules)


@pytest.mark.parametrize("name", METHODS)
def test_it_adds_up(tiny, name):
    result = run(tiny, name, Listening(tiny), rounds=12)
    parts = total_joules_by_part(of_clients(result.ledger))
    by_client = result.ledger.joules_by_client()
    by_round = [r.joules for r in result.rounds]
    for part in parts:
        assert sum(c[part] for c in by_client.values()) == pytest.approx(parts[part], rel=1e-12)
        assert sum(r[part] for r in by_round) == pytest.approx(parts[part], rel=1e-12)
    assert result.ledger.total_joules == pytest.approx(sum(parts.values()), rel=1e-12)
    assert sum(result.ledger.spent_joules.values()) == pytest.approx(sum(parts.values()), rel=1e-12)
    assert parts["train"] > 0


@pytest.mark.parametrize("name", [m for m in METHODS if m != "centralised"])
def test_bytes_are_those_of_the_messages(tiny, name):
    fleet = Listening(tiny)
    result = run(tiny, name, fleet, rounds=3)
    sent, pages = [x for x in fleet.all if x[3] != "evaluate"], of_clients(result.ledger)
    assert [c for p in pages for c in p.clients] == [c for c, *_ in sent]
    assert [b for p in pages for b in p.bytes_down.tolist()] == [down for _, down, _, _ in sent]
    assert [b for p in pages for b in p.bytes_up.tolist()] == [up for _, _, up, _ in sent]


def of_clients(ledger):
    """Without what edges and the cloud sent each other."""
    return [page for page in ledger.entries if page.link != EDGE_CLOUD]


def test_a_page_survives_as_a_line(tiny):
    import json

    for page in run(tiny, "powerd").ledger.entries:
        assert LedgerEntry.from_json(json.loads(json.dumps(page.line()))) == page


def test_a_round_lasts_as_long_as_its_slowest_client(tiny):
    costs = CostModel(profiles={"c5": PROFILES["microcontroller"]})
    result = run(tiny, cohort=6, costs=costs)
    page = result.ledger.of(1)[0]
    assert page.clients[int(np.argmax(page.seconds))] == "c5"
    assert result.rounds[0].sim_time_s == page.seconds.max()


def test_who_misses_the_deadline_is_charged_and_not_averaged(tiny):
    slow = {"c5": PROFILES["microcontroller"]}
    free = run(tiny, cohort=6, rounds=1, costs=CostModel(profiles=slow))
    seconds = sorted(free.ledger.entries[0].seconds.tolist())
    deadline_s = (seconds[-1] + seconds[-2]) / 2
    late = run(tiny, cohort=6, rounds=1, costs=CostModel(profiles=slow, deadline_s=deadline_s))
    assert late.rounds[0].late_clients == ("c5",)
    assert late.rounds[0].line()["late"] == 1
    assert late.rounds[0].metrics != free.rounds[0].metrics  # the dropped one has no say in the loss either
    assert late.rounds[0].sim_time_s == deadline_s
    assert late.ledger.entries == free.ledger.entries
    without = engine.run(build("fedavg", setting(cohort=6, rounds=1)), Deaf(tiny), rounds=1, seed=0)
    for k, v in without.state.models["global"].items():
        assert torch.equal(v, late.state.models["global"][k])


class Deaf(PlainFleet):
    def execute(self, plan):
        return {c: r for c, r in super().execute(plan).items() if c != "c5"}


def test_waiting_is_charged_when_asked(tiny):
    costs = CostModel(profiles={"c5": PROFILES["microcontroller"]}, count_idle=True)
    page = run(tiny, cohort=6, rounds=1, costs=costs).ledger.entries[0]
    waiting = page.seconds.max() - page.seconds
    assert page.idle_joules == pytest.approx(waiting * [costs.profile(c).idle_w for c in page.clients])
    assert page.parts()["train"] == pytest.approx(float((page.compute_joules + page.idle_joules).sum()))


def test_a_budget_ends_the_run_after_the_round_that_spends_it(tiny):
    whole = run(tiny, rounds=6)
    spent = np.cumsum([sum(r.joules.values()) for r in whole.rounds])
    found = run(tiny, rounds=6, costs=CostModel(budget_joules=0.999 * spent[2]))
    assert len(found.rounds) == 3
    assert found.stop_reason == f"the clients' budget of {0.999 * spent[2]:g} J is spent"
    assert found.rounds[-1].evaluation is not None
    assert [r.joules for r in found.rounds] == [r.joules for r in whole.rounds[:3]]


def test_clients_with_empty_batteries_leave(tiny):
    costs = CostModel(battery_joules=1e-9)  # one round's work is more than that
    result = run(tiny, rounds=6, cohort=2, costs=costs)
    cohorts = [set(p.clients) for p in result.ledger.entries]
    assert [len(c) for c in cohorts] == [2, 2, 2]
    assert set.union(*cohorts) == set(tiny)  # everybody once
    assert [set(r.left) for r in result.rounds] == cohorts
    assert result.stop_reason == "every battery is empty"


def test_a_run_that_is_resumed_knows_what_was_spent(tiny):
    method, fleet = build("fedavg", setting(rounds=6)), PlainFleet(tiny)
    first = engine.run(method, fleet, rounds=3, seed=0)
    costs = CostModel(budget_joules=first.ledger.total_joules)
    rest = engine.run(
        method,
        fleet,
        rounds=6,
        seed=0,
        state=first.state,
        earlier_rounds=first.rounds,
        ledger=Ledger(costs, first.ledger.entries),
    )
    assert len(rest.rounds) == 3
    assert rest.stop_reason is not None
    assert rest.accuracy == first.accuracy
