"""`shoal explain` shows for every method what the ledger of a run shows: the recipients of each stage, its rounds, and
the bytes that are sent. One client joins late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from federations import invert_clients, tiny_federation
from quick import quick_options

from shoal import engine
from shoal.cost.ledger import Ledger
from shoal.cost.timer import Timer
from shoal.experiment.assemble import assemble
from shoal.experiment.explain import explain_method
from shoal.experiment.job import Job
from shoal.fleet.plain import PlainFleet
from shoal.methods import METHODS

ROUNDS, LATE, JOINS = 25, "c5", 7  # it is present from round 7 on
COMPOSED = (
    "represent=labels,cluster=similar,select=one-of-each,personalise=fine-tune",
    "represent=sparsity,cluster=aidc,select=repclust,serve=confidence",
    "represent=labels,aggregate=secure,serve=prior",
)


@dataclass(frozen=True)
class Case:
    method: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    inverted: tuple[str, ...] = ()


CASES = {
    **{method: Case(method, quick_options(method)) for method in METHODS},
    **{method: Case(method, {"personalise": {"epochs": 1}} if "fine" in method else {}) for method in COMPOSED},
    "edges by labels": Case("fedavg", job={"edges": "similar:2", "cloud_every_rounds": 3}),
    "edges of shoal": Case("shoal", quick_options("shoal"), {"edges": "2"}),
    "labels and warm-up": Case("fedepc", {"represent": {"every_rounds": 6, "warmup": 5}}),
    "restarts": Case("ifca", {"cluster": {"restarts": 3}}),
    "surveys without a gap": Case("fedcor", {"survey": {"warmup": 2, "every_rounds": 2}}),
    "measured again": Case("apcsma", {"select": {"metrics": "fresh"}, "share": {"source": "clients"}}),
    "measured once": Case("apcsma", {"select": {"start": "cold"}}),
    "described": Case("fce", {"serve": {"rule": "density", "mask": "reported"}}),
    "tuned": Case("fedavg-ft", {"personalise": {"search": True, "epochs_grid": "1,2"}}),
    "a shift": Case(
        "shoal", quick_options("shoal") | {"probe": {"first_round": 4, "every_rounds": 9}}, inverted=("c0", "c2", "c4")
    ),
}

VARY = {  # case -> stage -> the direction of messages whose size depends on the data or on earlier training
    "scmoe": {"train": "down", "personalise": "down"},  # the experts of a client, some of which it has cached
    "pm-moe": {"personalise": "down"},  # the last layers of all clients that have trained one
    "a shift": {"train": "both", "personalise": "both"},  # the expert, once there are clusters
}


class JoinedLate(PlainFleet):
    """A fleet in which one client joins late."""

    there = False

    def roster(self):
        return tuple(c for c in super().roster() if self.there or c != LATE)


@dataclass
class Round:
    roster: set[str]
    members: tuple[set[str], set[str]]  # of clusters, before and after it
    cohort: int
    asked: dict[str, dict[str, tuple[int, int]]]  # stage -> client -> bytes down and up


def make_experiment(case):
    federation = invert_clients(tiny_federation(6), case.inverted)
    keys = {"rounds": ROUNDS, "cohort": 3, "epochs": 1, "batch_size": 16, "eval_every": 4, "seed": 3}
    job = Job(method=case.method, model="mlp", fleet="plain", set=case.options, **keys, **case.job)
    return assemble(job, case.method, federation)


def run_rounds(experiment):
    fleet, state, ledger, rounds = (
        JoinedLate(experiment.federation),
        experiment.method.init(3),
        Ledger(experiment.costs),
        [],
    )
    for round_index in range(ROUNDS):
        fleet.there, before = round_index + 1 >= JOINS, set(state.membership)
        state, record, _ = engine.run_round(experiment.method, fleet, state, 3, ledger, Timer())
        asked: dict[str, dict[str, tuple[int, int]]] = {}
        for p in ledger.of_round(round_index + 1):
            asked.setdefault(p.stage, {}).update(
                zip(p.clients, zip(p.bytes_down.tolist(), p.bytes_up.tolist(), strict=True), strict=True)
            )
        rounds.append(Round(set(fleet.roster()), (before, set(state.membership)), record.cohort_size, asked))
    return rounds


def stages_by_name(explanation):
    return {stage["stage"]: stage for step in explanation["steps"] for stage in step["stages"]}


def recipients_of(schedule, number):
    """Returns the recipients of a stage in this round, as `explain` describes them."""

    def has(series):
        since = number - series["first"]
        inside = since >= 0 and number <= series.get("last", number)
        return inside and (since == 0 or (series["every"] > 0 and since % series["every"] == 0))

    if any(map(has, schedule["rounds"])):
        return schedule["clients"]
    return schedule["clients_otherwise"] if any(series["first"] < number for series in schedule["rounds"]) else "none"


def check_recipients(recipients, stage, index, rounds):
    now, clients = rounds[index], set(rounds[index].asked.get(stage, ()))
    before = {c for past in rounds[:index] for c in past.asked.get(stage, ())}
    trained = [set(past.asked.get("train", ())) for past in rounds[: index + 1]]
    match recipients:
        case "none" | "retry":
            assert not clients
        case "all":
            assert clients == now.roster
        case "cohort":
            assert clients == trained[-1]
            assert len(clients) == now.cohort
        case "candidates" | "sample":
            assert clients
            assert clients <= now.roster
        case "late-joining":
            assert clients == now.roster - before
        case "returning":
            assert clients == trained[-1] & set().union(*trained[:-1]) - before
        case "members":
            assert clients == now.members[1] & now.roster
        case "new-members":
            assert clients == (now.members[1] & now.roster) - before
        case "unassigned":
            assert clients <= now.roster - now.members[0]
            assert now.members[0] or index == 0 or not clients, "once there are clusters"
        case "edges":
            assert clients == {f"edge-{k:03d}" for k in range(len(clients))}
            assert clients
        case _:
            raise AssertionError(recipients)


def check_sent(costs, stage, schedule, vary, rounds):
    ways = {"down": (1,), "both": ()}.get(vary, (0, 1))
    for words, cost in costs.items():
        first = cost["rounds"][0]
        last = first if words == f"in round {first}" else ROUNDS
        round_numbers = [n for n in range(first, last + 1) if recipients_of(schedule, n) == cost["recipients"]]
        asked = [each for n in round_numbers for c, each in rounds[n - 1].asked.get(stage, {}).items() if c != LATE]
        stated = (cost["bytes_down"], cost["bytes_up"])
        for way in ways if cost["num_clients"] else ():
            assert {each[way] for each in asked} == {stated[way] / cost["num_clients"]}, (stage, words)


@pytest.mark.parametrize("name", CASES)
def test_a_run_asks_and_sends_what_explain_says(name):
    experiment = make_experiment(CASES[name])
    stages, rounds = stages_by_name(explain_method(experiment)), run_rounds(experiment)
    assert {stage for now in rounds for stage in now.asked} <= stages.keys()
    for stage, facts in stages.items():
        for index in range(ROUNDS):
            check_recipients(recipients_of(facts["schedule"], index + 1), stage, index, rounds)
        check_sent(facts["costs"], stage, facts["schedule"], VARY.get(name, {}).get(stage, ""), rounds)


def test_the_late_probe_of_shoal_is_explained():
    case = Case("shoal", quick_options("shoal"))
    stages, (*_, now) = stages_by_name(explain_method(make_experiment(case))), run_rounds(make_experiment(case))[:21]
    for name in ("represent", "prior", "probe"):
        assert set(now.asked[name]) == now.roster, "round 21"
        costs = stages[name]["costs"]
        assert costs["in round 21"]["num_clients"] == 6
        assert costs["in round 21"]["joules"] > 0
        assert costs["in a usual later round"]["num_clients"] == 0


def test_a_client_that_cached_the_model_is_sent_it_only_once():
    case = Case("shoal", quick_options("shoal") | {"probe": {"first_round": 4, "every_rounds": 4}})
    costs = stages_by_name(explain_method(make_experiment(case)))["probe"]["costs"]
    assert costs["in round 5"]["bytes_down"] > 20 * costs["in a round such as 9"]["bytes_down"] > 0
