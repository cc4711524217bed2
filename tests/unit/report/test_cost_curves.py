"""Every round of these runs spends 10 J: preparation 1, training 6, communication 1, server 2."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt

import pytest

from shoal.report import Comparison, ComparisonRequest, accuracy_at_budget, cost_to_accuracy
from shoal.report.cost_curves import (
    ReachedAccuracy,
    Spread,
    common_accuracy,
    cost_curve,
    default_sustained_rounds,
    effective_accuracy_key,
    energy_breakdowns,
    final_accuracy,
    has_joules,
    server_joules_fraction,
    spread_over_seeds,
)
from shoal.store.reader import read_run

UPS_AND_DOWNS = [0.1, 0.4, 0.3, 0.4, 0.5, 0.5, 0.2, 0.6]
# The lowest of two rounds in a row, by the round at the end:  2: .1  3: .3  4: .3  5: .4  6: .5  7: .2  8: .2


@pytest.fixture
def run(write_course):
    return read_run(write_course("run", UPS_AND_DOWNS))


def test_joules_add_up_round_by_round(run):
    assert [p.joules for p in cost_curve(run)] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert cost_curve(run)[2].joules_by_part == {"training": 18, "preparation": 3, "communication": 3, "server": 6}
    assert [p.accuracy for p in cost_curve(run)] == UPS_AND_DOWNS


def test_the_server_can_be_left_out(run):
    clients = replace(run, joules_scope="clients")
    assert [p.joules for p in cost_curve(clients)] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert (server_joules_fraction(run), server_joules_fraction(clients)) == (pytest.approx(0.2), 0)
    assert cost_to_accuracy(clients, 0.4, sustained_rounds=2).joules == 40
    assert accuracy_at_budget(clients, 40, sustained_rounds=2) == 0.4


def test_an_accuracy_is_reached_when_it_has_been_sustained(run):
    assert cost_to_accuracy(run, 0.4, sustained_rounds=2) == ReachedAccuracy(
        5, 50, {"training": 30, "preparation": 5, "communication": 5, "server": 10}, sim_s=10
    )
    assert cost_to_accuracy(run, 0.5, sustained_rounds=2) == ReachedAccuracy(
        6, 60, {"training": 36, "preparation": 6, "communication": 6, "server": 12}, sim_s=12
    )
    assert cost_to_accuracy(run, 0.4, sustained_rounds=1).round == 2
    assert cost_to_accuracy(run, 0.6, sustained_rounds=2) is None


def test_accuracy_at_a_budget_is_the_best_that_was_sustained_within_it(run):
    assert accuracy_at_budget(run, 10, sustained_rounds=2) is None  # one round is not two
    assert accuracy_at_budget(run, 20, sustained_rounds=2) == 0.1
    assert accuracy_at_budget(run, 49.9, sustained_rounds=2) == 0.3
    assert accuracy_at_budget(run, 50, sustained_rounds=2) == 0.4
    assert accuracy_at_budget(run, 80, sustained_rounds=2) == 0.5  # and not the 0.6 of the last round alone
    assert accuracy_at_budget(run, inf, sustained_rounds=1) == 0.6


def test_too_few_rounds_sustain_no_accuracy(run):
    assert accuracy_at_budget(run, inf) is None
    assert cost_to_accuracy(run, 0.1) is None


def test_rounds_without_evaluation_cost_but_do_not_count(write_course):
    run = read_run(write_course("run", [0.4, None, None, 0.4, None]))
    assert cost_to_accuracy(run, 0.4, sustained_rounds=2) == ReachedAccuracy(
        4, 40, {"training": 24, "preparation": 4, "communication": 4, "server": 8}, sim_s=8
    )
    assert final_accuracy(run) == 0.4


def test_the_last_rounds_are_averaged(run):
    assert final_accuracy(run, num_rounds=3) == pytest.approx((0.5 + 0.2 + 0.6) / 3)
    assert final_accuracy(run, num_rounds=99) == pytest.approx(3.0 / 8)


def test_without_a_central_test_set_local_accuracy_counts(write_course):
    central, local = (read_run(write_course(kind, [0.7], kind=kind)) for kind in ("central", "local"))
    assert (effective_accuracy_key(central), effective_accuracy_key(local)) == ("central", "local")
    assert (
        accuracy_at_budget(central, inf, sustained_rounds=1)
        == accuracy_at_budget(local, inf, sustained_rounds=1)
        == 0.7
    )


def test_a_killed_run_may_lack_the_last_server_seconds(write_course):
    path = write_course("run", [0.1, 0.2, 0.3])
    lines = (path / "timing.jsonl").read_text().splitlines(keepends=True)
    (path / "timing.jsonl").write_text("".join(lines[:2]))
    assert [p.joules for p in cost_curve(read_run(path))] == [10, 20, 28]


def test_a_run_without_a_ledger_has_no_joules(write_run, run):
    assert has_joules(run)
    assert not has_joules(read_run(write_run("old")))


def test_spread_over_seeds():
    assert spread_over_seeds([1.0, 2.0, None]) == Spread(1.5, pytest.approx(1 / sqrt(2)), 2, 3)
    assert spread_over_seeds([5.0]) == Spread(5.0, None, 1, 1)
    assert spread_over_seeds([None, None]) is None
    assert not spread_over_seeds([1.0, None]).is_complete


def test_the_common_accuracy_is_the_highest_whole_percent_that_all_runs_sustained(write_course, run):
    other = read_run(write_course("other", [0.295, 0.3]))  # sustains 0.295 for two rounds
    assert common_accuracy([run], sustained_rounds=2) == 0.5
    assert common_accuracy([run, other], sustained_rounds=2) == 0.29
    assert common_accuracy([run, other], sustained_rounds=3) is None
    assert (
        common_accuracy([read_run(write_course("third", [0.29, 0.29]))], sustained_rounds=2) == 0.29
    )  # 100 * 0.29 is below 29


def test_energy_breakdowns_are_means_over_seeds_at_the_common_accuracy(write_course):
    runs = [
        read_run(write_course("a", [0.5, 0.5, 0.5, 0.5], seed=0)),  # sustains 0.3 at round 2
        read_run(write_course("b", [0.1, 0.1, 0.5, 0.5], seed=1)),  # at round 4
        read_run(write_course("c", [0.1, 0.3, 0.3, 0.3], "local")),  # at round 3
    ]
    target, (fedavg, local) = energy_breakdowns(runs, sustained_rounds=2)
    assert target == 0.3
    assert (fedavg.label, fedavg.num_seeds, fedavg.mean_rounds) == ("fedavg", 2, 3)
    assert fedavg.joules_by_part == {"training": 18, "preparation": 3, "communication": 3, "server": 6}
    assert (local.joules, local.mean_rounds, local.whole_joules) == (30, 3, 40)


def test_energy_breakdowns_without_a_common_accuracy_are_of_whole_runs(write_course):
    target, (breakdown,) = energy_breakdowns([read_run(write_course("a", [0.5, 0.5, 0.5]))])
    assert target is None
    assert (breakdown.joules, breakdown.mean_rounds) == (30, 3)


@pytest.mark.parametrize(("rounds", "sustained"), [(1, 3), (10, 3), (20, 5), (40, 10), (90, 20)])
def test_the_default_of_sustained_rounds_follows_the_shortest_run(rounds, sustained, write_course):
    short = read_run(write_course("short", [0.5] * rounds))
    assert default_sustained_rounds([short]) == sustained
    assert default_sustained_rounds([read_run(write_course("long", [0.5] * 100, "local")), short]) == sustained
    (table,) = Comparison([short], ComparisonRequest.parse("0.4", None)).tables()
    assert f"{sustained} evaluated rounds in a row" in table.notes[0]
    assert (table.rows[0][1] == "–") == (rounds < sustained)
