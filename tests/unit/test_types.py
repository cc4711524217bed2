"""The clients to which a stage sends tasks, the rounds in which it does, and the sentences about it."""

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

ALL_PERIODICALLY = Schedule("all", (Rounds(0, 20),), "late-joining")
PROBE = Schedule("all", (Rounds(20, 20),), "unassigned")
SURVEY = Schedule("all", (Rounds(0, 1, last=10), Rounds(19, 10), Rounds(20, 10)))


def rounds_of(schedule: Schedule, kind: Recipients, rounds: int = 45) -> list[int]:
    """Returns the rounds in which these clients receive tasks, counted from 1."""
    return [r + 1 for r in range(rounds) if schedule.clients_in(r) == kind]


def test_between_two_rounds_with_all_clients_only_late_joining_clients_receive_tasks():
    assert rounds_of(ALL_PERIODICALLY, "all") == [1, 21, 41]
    assert rounds_of(ALL_PERIODICALLY, "late-joining", 5) == [2, 3, 4, 5]
    assert all(ALL_PERIODICALLY.due(r) for r in range(45))


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
            ALL_PERIODICALLY,
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
def test_a_schedule_reads_as_a_sentence(schedule, sentence):
    assert str(schedule) == sentence
    assert schedule.to_json()["sentence"] == sentence


def test_json_counts_rounds_from_one():
    facts = SURVEY.to_json()
    assert facts["rounds"] == [
        {"first": 1, "every": 1, "last": 11},
        {"first": 20, "every": 10},
        {"first": 21, "every": 10},
    ]
    assert (facts["clients"], facts["clients_otherwise"]) == ("all", "none")


@pytest.mark.parametrize(
    ("schedule", "rounds", "max_tasks"),
    [
        (ALL_PERIODICALLY, 1, 1),
        (ALL_PERIODICALLY, 20, 1),
        (ALL_PERIODICALLY, 21, 2),
        (ALL_PERIODICALLY, 41, 3),
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
def test_number_of_tasks_that_one_client_may_receive(schedule, rounds, max_tasks):
    assert schedule.max_tasks_per_client(rounds) == max_tasks


class Own(OneProgram):
    """The shortest stage that a user can write."""

    name = "own"


def test_a_stage_without_a_declared_schedule_is_due_in_every_round():
    assert [Own().due(r) for r in range(3)] == [True] * 3
    assert str(Own().schedule) == "In every round, the clients that the stage names in its plan receive a task."
    assert Own().purpose == "preparation"


@pytest.mark.parametrize("method", METHODS)
def test_every_stage_declares_its_recipients_and_is_due_as_declared(method):
    s = Setting(load_model("mlp", (6,), 4), rounds=25, cohort_size=3, eval_every=4, options=quick_options(method))
    for stage in build(method, s).stages:
        assert stage.schedule.clients != "unstated", stage.name
        assert (stage.schedule.clients in ("none", "edges")) == (not stage.programs), stage.name
        assert type(stage).due is Scheduled.due, "a stage declares its schedule, and nothing beside it"


def rounds_by_kind(schedule: Schedule, rounds: int) -> dict[str, tuple[int, ...]]:
    """Returns the rounds that `explain` runs for each kind of round, counted from 1."""
    return {k: tuple(r + 1 for r in kind.run_rounds) for k, kind in round_kinds(schedule, rounds).items()}


def test_kinds_of_rounds_by_hand():
    usual = {"in round 1": (1,), "in a usual later round": (2, 3)}
    assert rounds_by_kind(Schedule("cohort"), 10) == usual
    assert rounds_by_kind(ALL_PERIODICALLY, 20) == usual
    assert rounds_by_kind(ALL_PERIODICALLY, 21) == usual | {"in round 21": (21,)}
    assert rounds_by_kind(ALL_PERIODICALLY, 41) == usual | {"in a round such as 21": (21,)}
    # Nothing is due before the first probe. A usual round has no probe, and the first probe is a kind of its own.
    assert rounds_by_kind(PROBE, 20) == usual
    after = {"in round 1": (1,), "in a usual later round": (22,), "in round 21": (21,)}
    assert rounds_by_kind(PROBE, 60) == after | {"in round 41": (41,)}
    assert rounds_by_kind(PROBE, 61) == after | {"in a round such as 41": (41,)}
    # The run has one round or two.
    assert rounds_by_kind(ALL_PERIODICALLY, 1) == {"in round 1": (1,)}
    assert rounds_by_kind(Schedule("cohort"), 2) == {"in round 1": (1,), "in a usual later round": (2,)}
    # The stage is due in every second round. The others are the usual rounds.
    every_second = Schedule("all", periodic_rounds(10, 2))
    first = {"in round 1": (1,), "in a usual later round": (3,)}
    assert rounds_by_kind(every_second, 10) == first | {"in round 2": (2,), "in a round such as 4": (4,)}


@dataclass(frozen=True)
class WithoutSchedule:
    name: str = "mine"
    programs = ()

    def due(self, round):
        return True


def test_a_stage_without_a_schedule_is_refused():
    def own(setting):
        return one_model_method(setting, "own", WithoutSchedule())

    with pytest.raises(UserError, match="stage 'mine' of method own has no schedule; its class must be a subclass"):
        build(own, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3))
