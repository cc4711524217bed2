"""What `shoal explain` says of every method is what the ledger of a run shows: which clients each stage asks, in which
rounds, and what is sent. One client joins late."""

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

ROUNDS, LATE, JOINS = 25, "c5", 7  # it is there from round 7 on
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
    "edges by labels": Case("fedavg", job={"edges": "alike:2", "cloud_every": 3}),
    "edges of shoal": Case("shoal", quick_options("shoal"), {"edges": "2"}),
    "labels and warm-up": Case("fedepc", {"represent": {"every": 6, "warmup": 5}}),
    "restarts": Case("ifca", {"cluster": {"restarts": 3}}),
    "surveys without a gap": Case("fedcor", {"survey": {"warmup": 2, "every": 2}}),
    "measured anew": Case("apcsma", {"select": {"metrics": "fresh"}, "share": {"rows_of": "clients"}}),
    "measured once": Case("apcsma", {"select": {"start": "cold"}}),
    "described": Case("fce", {"serve": {"rule": "density", "mask": "told"}}),
    "tuned": Case("fedavg-ft", {"personalise": {"tune": True, "passes": "1,2"}}),
    "a shift": Case("shoal", quick_options("shoal") | {"probe": {"at": 4, "every": 9}}, inverted=("c0", "c2", "c4")),
}

VARY = {  # case -> stage -> what of its messages follows from what the data show, or from what was trained before
    "scmoe": {"train": "down", "personalise": "down"},  # the experts of a client, of which it has some
    "pm-moe": {"personalise": "down"},  # the last layers of all clients that have trained one
    "a shift": {"train": "both", "personalise": "both"},  # the expert, once there are clusters
}


class JoinedLate(PlainFleet):
    """One client is not there at first."""

    there = False

    def roster(self):
        return tuple(c for c in super().roster() if self.there or c != LATE)


@dataclass
class Round:
    roster: set[str]
    members: tuple[set[str], set[str]]  # of clusters, before and after it
    cohort: int
    asked: dict[str, dict[str, tuple[int, int]]]  # stage -> client -> bytes down and up


def bench_of(case):
    federation = invert_clients(tiny_federation(6), case.inverted)
    keys = {"rounds": ROUNDS, "cohort": 3, "epochs": 1, "batch_size": 16, "eval_every": 4, "seed": 3}
    job = Job(method=case.method, model="mlp", fleet="plain", set=case.options, **keys, **case.job)
    return assemble(job, case.method, federation)


def played(bench):
    fleet, state, ledger, found = JoinedLate(bench.federation), bench.method.init(3), Ledger(bench.costs), []
    for round in range(ROUNDS):
        fleet.there, before = round + 1 >= JOINS, set(state.membership)
        state, record, _ = engine.run_round(bench.method, fleet, state, 3, ledger, Timer())
        asked: dict[str, dict[str, tuple[int, int]]] = {}
        for p in ledger.of_round(round + 1):
            asked.setdefault(p.stage, {}).update(
                zip(p.clients, zip(p.bytes_down.tolist(), p.bytes_up.tolist(), strict=True), strict=True)
            )
        found.append(Round(set(fleet.roster()), (before, set(state.membership)), record.cohort_size, asked))
    return found


def stages_of(told):
    return {stage["stage"]: stage for step in told["steps"] for stage in step["stages"]}


def kind_of(schedule, number):
    """Whom a stage asks in this round, as the words of explain are to be read."""

    def has(series):
        since = number - series["first"]
        inside = since >= 0 and number <= series.get("last", number)
        return inside and (since == 0 or (series["every"] > 0 and since % series["every"] == 0))

    if any(map(has, schedule["rounds"])):
        return schedule["clients"]
    return schedule["others"] if any(series["first"] < number for series in schedule["rounds"]) else "none"


def check_asked(kind, stage, place, rounds):
    now, clients = rounds[place], set(rounds[place].asked.get(stage, ()))
    before = {c for past in rounds[:place] for c in past.asked.get(stage, ())}
    trained = [set(past.asked.get("train", ())) for past in rounds[: place + 1]]
    match kind:
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
            assert now.members[0] or place == 0 or not clients, "once there are clusters"
        case "edges":
            assert clients == {f"edge-{k:03d}" for k in range(len(clients))}
            assert clients
        case _:
            raise AssertionError(kind)


def check_sent(costs, stage, schedule, vary, rounds):
    ways = {"down": (1,), "both": ()}.get(vary, (0, 1))
    for words, cost in costs.items():
        first = cost["rounds"][0]
        last = first if words == f"in round {first}" else ROUNDS
        alike = [n for n in range(first, last + 1) if kind_of(schedule, n) == cost["asked"]]
        asked = [each for n in alike for c, each in rounds[n - 1].asked.get(stage, {}).items() if c != LATE]
        stated = (cost["bytes_down"], cost["bytes_up"])
        for way in ways if cost["clients"] else ():
            assert {each[way] for each in asked} == {stated[way] / cost["clients"]}, (stage, words)


@pytest.mark.parametrize("name", CASES)
def test_a_run_asks_and_sends_what_explain_says(name):
    bench = bench_of(CASES[name])
    stages, rounds = stages_of(explain_method(bench)), played(bench)
    assert {stage for now in rounds for stage in now.asked} <= stages.keys()
    for stage, facts in stages.items():
        for place in range(ROUNDS):
            check_asked(kind_of(facts["schedule"], place + 1), stage, place, rounds)
        check_sent(facts["costs"], stage, facts["schedule"], VARY.get(name, {}).get(stage, ""), rounds)


def test_the_probe_of_shoal_is_seen_although_it_is_far_away():
    case = Case("shoal", quick_options("shoal"))
    stages, (*_, now) = stages_of(explain_method(bench_of(case))), played(bench_of(case))[:21]
    for name in ("represent", "prior", "probe"):
        assert set(now.asked[name]) == now.roster, "round 21"
        costs = stages[name]["costs"]
        assert costs["in round 21"]["clients"] == 6
        assert costs["in round 21"]["joules"] > 0
        assert costs["in a usual later round"]["clients"] == 0


def test_a_client_that_keeps_the_model_is_sent_it_only_the_first_time():
    case = Case("shoal", quick_options("shoal") | {"probe": {"at": 4, "every": 4}})
    costs = stages_of(explain_method(bench_of(case)))["probe"]["costs"]
    assert costs["in round 5"]["bytes_down"] > 20 * costs["in a round such as 9"]["bytes_down"] > 0
