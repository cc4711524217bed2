"""What most stages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shoal.types import ClientId, ClientProgram, Plan, Report, Schedule, ServerState, StagePurpose, periodic_rounds

CLUSTERING_LIBRARIES = ("sklearn.cluster", "sklearn.metrics", "scipy.optimize")  # what clusterers import


def with_samples(reports: Mapping[ClientId, Report]) -> dict[ClientId, Report]:
    """Of those who could train: a model that comes back as it went, or a choice by no row, says nothing."""
    return {c: r for c, r in reports.items() if r.counts["train"] > 0}


class Scheduled:
    """A stage that is due in the rounds of its schedule."""

    imports_later: ClassVar[tuple[str, ...]] = ()  # slow libraries that the stage imports when it first works

    @property
    def purpose(self) -> StagePurpose:
        return "pre"

    @property
    def schedule(self) -> Schedule:
        """In every round, whichever clients `plan` names."""
        return Schedule()

    def due(self, round_index: int) -> bool:
        return self.schedule.due(round_index)


class ServerOnly(Scheduled):
    """A step without client work."""

    programs: tuple[ClientProgram, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return Schedule("none")

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan()


class OneProgram(Scheduled):
    """A step whose clients all run the same program."""

    program: ClientProgram

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        return (self.program,)


class DueWhenEvaluated(Scheduled):
    """Due in the rounds that are evaluated by plan. A run that a budget ends in between is measured with what there is
    then."""

    rounds: int
    every_rounds: int

    @property
    def schedule(self) -> Schedule:
        return Schedule("all", periodic_rounds(self.rounds, self.every_rounds))
