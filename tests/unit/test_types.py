"""Which clients a stage sends tasks to, in which rounds, and how that reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from quick import quick_options

from shoal.errors import UserError
from shoal.experiment.explain import round_kinds
from shoal.methods import METHODS, Setting, build
from shoal.methods.fedavg import one_model_method
from shoal.models import load_model
from shoal.stages.base import OneProgram, Scheduled
from shoal.types import Recipients, Rounds, Schedule, periodic_rounds

ALL_AGAIN = Schedule("all", (Rounds(0, 20),), "late-joining")
PROBE = Schedule("all", (Rounds(20, 20),), "unassigned")
SURVEY = Schedule("all", (Rounds(0, 1, last=10), Rounds(19, 10), Rounds(20, 10)))


def rounds_of(schedule: Schedule, kind: Recipients, rounds: int = 45) -> list[int]:
    """Counted from 1."""
    return [r + 1 for r in range(rounds) if schedule.clients_in(r) == kind]


def test_every_so_many_rounds_all_clients_and_between_them_those_that_have_not_reported():
    assert rounds_of(ALL_AGAIN, "all") == [1, 21, 41]
    assert rounds_of(ALL_AGAIN, "late-joining", 5) == [2, 3, 4, 5]
    assert all(ALL_AGAIN.due(r) for r in range(45))


def test_nothing_is_due_before_the_first_round():
    assert rounds_of(PROBE, "none") == list(range(1, 21))
    assert rounds_of(PROBE, "all") == [21, 41]
    assert [PROBE.due(r) for r in (0, 19, 20, 21)] == [False, False, True, True]


def test_several_series_of_rounds():
    assert rounds_of(SURVEY, "all", 32) == [*range(1, 12), 20, 21, 30, 31]
    assert not SURVEY.due(11)


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [(10, 4, [4, 8, 10]), (8, 4, [4, 8]), (3, 4, [3]), (3, 1, [1, 2, 3]), (0, 5, [5, 10])],
)
def test_rounds_that_are_evaluated(rounds, every, expected):
    assert rounds_of(Schedule("all", periodic_rounds(rounds, every)), "all", rounds or 12) == expected


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (Schedule("cohort"), "In every round, the clients of the cohort receive a task."),
        (
            ALL_AGAIN,
            "In round 1 and every 20 rounds after it, all clients receive a task. In other rounds, clients that have "
            "not reported yet receive a task, such as late-joining clients.",
        ),
        (
            PROBE,
            "In round 21 and every 20 rounds after it, all clients receive a task. In other rounds after round 21, "
            "clients outside all clusters receive a task, once there are clusters.",
        ),
        (
            SURVEY,
            "In rounds 1 to 11, round 20 and every 10 rounds after it, and round 21 and every 10 rounds after it, all "
            "clients receive a task.",
        ),
        (
            Schedule("all", (Rounds(1, 1),), "late-joining"),
            "In round 2 and every round after it, all clients receive a task.",
        ),
        (
            Schedule("all", (Rounds(0, 0),), "retry"),
            "In round 1, all clients receive a task. In other rounds, the stage repeats this as long as no client has "
            "reported.",
        ),
        (
            Schedule("all", (Rounds(5, 5, last=15),)),
            "In round 6 and every 5 rounds after it up to round 16, all clients receive a task.",
        ),
        (Schedule("none"), "In every round, only the server works."),
        (Schedule("all", ()), "The stage is never due."),
    ],
)
def test_it_reads_as_a_sentence(schedule, sentence):
    assert str(schedule) == sentence
    assert schedule.facts()["sentence"] == sentence


def test_facts_count_rounds_from_one():
    facts = SURVEY.to_json()
    assert facts["rounds"] == [
        {"first": 1, "every": 1, "last": 11},
        {"first": 20, "every": 10},
        {"first": 21, "every": 10},
    ]
    assert (facts["clients"], facts["others"]) == ("all", "none")


@pytest.mark.parametrize(
    ("schedule", "rounds", "most"),
    [
        (ALL_AGAIN, 1, 1),
        (ALL_AGAIN, 20, 1),
        (ALL_AGAIN, 21, 2),
        (ALL_AGAIN, 41, 3),
        (Schedule("all", (Rounds(0, 0),), "late-joining"), 100, 1),
        (Schedule("all", (Rounds(0, 0),), "retry"), 100, 1),
        (PROBE, 20, 0),
        (PROBE, 21, 1),
        (Schedule("new-members"), 100, 1),
        (Schedule("cohort"), 7, 7),
        (Schedule(), 7, 7),
        (Schedule("none"), 7, 0),
        (Schedule("members", (Rounds(3, 4),), "candidates"), 8, 2 + 3),  # rounds 4 and 8; 5, 6 and 7
    ],
)
def test_how_many_tasks_one_client_may_receive(schedule, rounds, most):
    assert schedule.max_tasks_per_client(rounds) == most


class Own(OneProgram):
    """As short as a stage of a user's own."""

    name = "own"


def test_a_stage_that_says_nothing_is_due_in_every_round():
    assert [Own().due(r) for r in range(3)] == [True] * 3
    assert str(Own().schedule) == "In every round, the clients that the stage names in its plan receive a task."
    assert Own().purpose == "pre"


@pytest.mark.parametrize("method", METHODS)
def test_every_stage_says_whom_it_asks_and_is_due_when_it_says(method):
    s = Setting(load_model("mlp", (6,), 4), rounds=25, cohort_size=3, eval_every=4, options=quick_options(method))
    for stage in build(method, s).stages:
        assert stage.schedule.clients != "unstated", stage.name
        assert (stage.schedule.clients in ("none", "edges")) == (not stage.programs), stage.name
        assert type(stage).due is Scheduled.due, "a stage declares its schedule, and nothing beside it"


def words(schedule: Schedule, rounds: int) -> dict[str, tuple[int, ...]]:
    """The kinds of rounds that explain tells apart, and the rounds that it plays for each, counted from 1."""
    return {k: tuple(r + 1 for r in kind.run_rounds) for k, kind in round_kinds(schedule, rounds).items()}


def test_kinds_of_rounds_by_hand():
    usual = {"in round 1": (1,), "in a usual later round": (2, 3)}
    assert words(Schedule("cohort"), 10) == usual
    assert words(ALL_AGAIN, 20) == usual
    assert words(ALL_AGAIN, 21) == usual | {"in round 21": (21,)}
    assert words(ALL_AGAIN, 41) == usual | {"in a round such as 21": (21,)}
    # nothing is due before the first probe; a usual round is one without a probe, and the first probe stands alone
    assert words(PROBE, 20) == usual
    after = {"in round 1": (1,), "in a usual later round": (22,), "in round 21": (21,)}
    assert words(PROBE, 60) == after | {"in round 41": (41,)}
    assert words(PROBE, 61) == after | {"in a round such as 41": (41,)}
    # no round but the first, or only one more
    assert words(ALL_AGAIN, 1) == {"in round 1": (1,)}
    assert words(Schedule("cohort"), 2) == {"in round 1": (1,), "in a usual later round": (2,)}
    # every second round: the others are the usual ones
    every_second = Schedule("all", periodic_rounds(10, 2))
    first = {"in round 1": (1,), "in a usual later round": (3,)}
    assert words(every_second, 10) == first | {"in round 2": (2,), "in a round such as 4": (4,)}


@dataclass(frozen=True)
class WithoutSchedule:
    name: str = "mine"
    programs = ()

    def due(self, round):
        return True


def test_a_stage_without_a_schedule_is_refused():
    def own(s):
        return one_model_method(s, "own", WithoutSchedule())

    with pytest.raises(UserError, match="stage 'mine' of method own has no schedule; it must be a subclass"):
        build(own, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3))
