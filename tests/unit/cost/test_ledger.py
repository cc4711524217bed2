"""Numbers are worked out for the MLP with layers of 6, 64, 30 and 4: 384 + 1,920 + 120 multiply-adds per sample."""

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
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 4, "cohort_size": 3, "batch_size": 8} | kw)


class MessageSizes(PlainFleet):
    """Also records the sizes of the messages of each stage."""

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
    result = run(tiny, fleet=fleet(tiny), epochs=3, cohort_size=6)
    entry = result.ledger.entries[0]
    sizes = [len(tiny[c]["train"].y) for c in entry.clients]
    assert entry.flops.tolist() == [3 * n * TRAINING for n in sizes]


def test_a_probe_costs_a_forward_pass_only(tiny):
    result = run(tiny, "powerd", epochs=1, options={"select": {"candidates": 6}})
    probe = next(p for p in result.ledger.entries if p.stage == "select")
    assert probe.purpose == "preparation"
    assert probe.flops.tolist() == [len(tiny[c]["train"].y) * FORWARD for c in probe.clients]


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        # Multiply-adds of the convolutions on 30 x 30, 13 x 13, 4 x 4 outputs, then two dense layers.
        ("cnn-cifar", (3, 32, 32), [900 * 32 * 27, 169 * 64 * 288, 16 * 64 * 576, 256 * 64, 64 * 10]),
        # The convolutions have 60 and 26 outputs in time.
        ("cnn-1d", (6, 64), [60 * 32 * 30, 26 * 64 * 160, 832 * 64, 64 * 10]),
    ],
)
def test_convolutions_without_padding(name, shape, layers):
    from shoal.client.train import LocalTraining
    from shoal.fleet.flops import count_flops
    from shoal.types import Task

    model = load_model(name, shape, 10)
    program = LocalTraining(model)
    state = program.begin(Task({"global": model.init(0)}), {})
    work = count_flops(program.phases[0], state, torch.zeros(1, *shape))
    assert work.per_sample == 2 * (3 * sum(layers) - layers[0])
    assert (work.per_step, work.at_end) == (0, 0)


def test_seconds_and_joules_follow_from_device_and_link(tiny):
    slow, fast = PROFILES["microcontroller"], PROFILES["jetson"]
    costs = CostModel(profiles={"c0": slow}, default_profile=fast, link=LINKS["ethernet"])
    entry = run(tiny, cohort_size=6, costs=costs).ledger.entries[0]
    index = entry.clients.index("c0")
    for i, profile in ((index, slow), (index + 1, fast)):
        assert entry.compute_s[i] == pytest.approx(entry.flops[i] / profile.flops_per_s)
        assert entry.compute_joules[i] == pytest.approx(entry.compute_s[i] * profile.active_w)
        down, up = (
            LINKS["ethernet"].download(int(entry.bytes_down[i])),
            LINKS["ethernet"].upload(int(entry.bytes_up[i])),
        )
        assert entry.radio_s[i] == pytest.approx(down.seconds + up.seconds)
        assert entry.radio_joules[i] == pytest.approx(down.joules + up.joules)


@pytest.mark.parametrize("name", METHODS)
def test_it_adds_up(tiny, name):
    result = run(tiny, name, MessageSizes(tiny), rounds=12)
    parts = total_joules_by_part(client_entries(result.ledger))
    by_client = result.ledger.joules_by_client()
    by_round = [r.joules for r in result.rounds]
    for part in parts:
        assert sum(c[part] for c in by_client.values()) == pytest.approx(parts[part], rel=1e-12)
        assert sum(r[part] for r in by_round) == pytest.approx(parts[part], rel=1e-12)
    assert result.ledger.total_joules == pytest.approx(sum(parts.values()), rel=1e-12)
    assert sum(result.ledger.spent_joules.values()) == pytest.approx(sum(parts.values()), rel=1e-12)
    assert parts["training"] > 0


@pytest.mark.parametrize("name", [m for m in METHODS if m != "centralised"])
def test_bytes_are_those_of_the_messages(tiny, name):
    fleet = MessageSizes(tiny)
    result = run(tiny, name, fleet, rounds=3)
    sent, entries = [x for x in fleet.all if x[3] != "evaluate"], client_entries(result.ledger)
    assert [c for e in entries for c in e.clients] == [c for c, *_ in sent]
    assert [b for e in entries for b in e.bytes_down.tolist()] == [down for _, down, _, _ in sent]
    assert [b for e in entries for b in e.bytes_up.tolist()] == [up for _, _, up, _ in sent]


def client_entries(ledger):
    """Returns the entries without those of the edge-cloud link."""
    return [entry for entry in ledger.entries if entry.link != EDGE_CLOUD]


def test_an_entry_can_be_read_from_its_line(tiny):
    import json

    for entry in run(tiny, "powerd").ledger.entries:
        assert LedgerEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


def test_a_round_lasts_as_long_as_its_slowest_client(tiny):
    costs = CostModel(profiles={"c5": PROFILES["microcontroller"]})
    result = run(tiny, cohort_size=6, costs=costs)
    entry = result.ledger.of_round(1)[0]
    assert entry.clients[int(np.argmax(entry.seconds))] == "c5"
    assert result.rounds[0].sim_time_s == entry.seconds.max()


def test_a_late_report_is_charged_and_not_aggregated(tiny):
    slow = {"c5": PROFILES["microcontroller"]}
    free = run(tiny, cohort_size=6, rounds=1, costs=CostModel(profiles=slow))
    seconds = sorted(free.ledger.entries[0].seconds.tolist())
    deadline_s = (seconds[-1] + seconds[-2]) / 2
    late = run(tiny, cohort_size=6, rounds=1, costs=CostModel(profiles=slow, deadline_s=deadline_s))
    assert late.rounds[0].late_clients == ("c5",)
    assert late.rounds[0].to_json()["num_late_reports"] == 1
    assert late.rounds[0].metrics != free.rounds[0].metrics  # the late report does not count in the loss either
    assert late.rounds[0].sim_time_s == deadline_s
    assert late.ledger.entries == free.ledger.entries
    without = engine.run(build("fedavg", setting(cohort_size=6, rounds=1)), WithoutC5(tiny), rounds=1, seed=0)
    for k, v in without.state.models["global"].items():
        assert torch.equal(v, late.state.models["global"][k])


class WithoutC5(PlainFleet):
    def execute(self, plan):
        return {c: r for c, r in super().execute(plan).items() if c != "c5"}


def test_waiting_is_charged_with_count_idle(tiny):
    costs = CostModel(profiles={"c5": PROFILES["microcontroller"]}, count_idle=True)
    entry = run(tiny, cohort_size=6, rounds=1, costs=costs).ledger.entries[0]
    waiting = entry.seconds.max() - entry.seconds
    assert entry.idle_joules == pytest.approx(waiting * [costs.profile(c).idle_w for c in entry.clients])
    assert entry.joules_by_part()["training"] == pytest.approx(float((entry.compute_joules + entry.idle_joules).sum()))


def test_a_budget_ends_the_run_after_the_round_that_spends_it(tiny):
    unlimited = run(tiny, rounds=6)
    spent = np.cumsum([sum(r.joules.values()) for r in unlimited.rounds])
    limited = run(tiny, rounds=6, costs=CostModel(budget_joules=0.999 * spent[2]))
    assert len(limited.rounds) == 3
    assert limited.stop_reason == f"the clients' budget of {0.999 * spent[2]:g} J is spent"
    assert limited.rounds[-1].evaluation is not None
    assert [r.joules for r in limited.rounds] == [r.joules for r in unlimited.rounds[:3]]


def test_depleted_clients_take_no_further_part(tiny):
    costs = CostModel(battery_joules=1e-9)  # one round's work is more than that
    result = run(tiny, rounds=6, cohort_size=2, costs=costs)
    cohorts = [set(p.clients) for p in result.ledger.entries]
    assert [len(c) for c in cohorts] == [2, 2, 2]
    assert set.union(*cohorts) == set(tiny)  # every client once
    assert [set(r.depleted_clients) for r in result.rounds] == cohorts
    assert result.stop_reason == "every battery is empty"


def test_a_resumed_run_counts_the_joules_spent_before(tiny):
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
