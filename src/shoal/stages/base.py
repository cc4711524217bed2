"""Base classes of stages: when a stage is due, and which clients run its programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shoal.types import ClientId, ClientProgram, Plan, Report, Schedule, ServerState, StagePurpose, periodic_rounds

CLUSTERING_LIBRARIES = ("sklearn.cluster", "sklearn.metrics", "scipy.optimize")  # the slow imports of clusterers


def with_samples(reports: Mapping[ClientId, Report]) -> dict[ClientId, Report]:
    """Returns the reports of the clients that have training samples.

    Without samples a model returns unchanged, and the choice of a model is arbitrary.
    """
    return {c: r for c, r in reports.items() if r.counts["train"] > 0}


class Scheduled:
    """Is due in the rounds of its schedule."""

    imports_later: ClassVar[tuple[str, ...]] = ()  # slow libraries that the stage imports when it first works

    @property
    def purpose(self) -> StagePurpose:
        return "preparation"

    @property
    def schedule(self) -> Schedule:
        """Returns a schedule of every round. `plan` decides which clients get a task."""
        return Schedule()

    def due(self, round_index: int) -> bool:
        return self.schedule.due(round_index)


class ServerOnly(Scheduled):
    """Runs on the server alone and sends no tasks."""

    programs: tuple[ClientProgram, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return Schedule("none")

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan()


class OneProgram(Scheduled):
    """Sends all clients the same program."""

    program: ClientProgram

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        return (self.program,)


class DueWhenEvaluated(Scheduled):
    """Is due in the rounds with a planned evaluation.

    If a budget ends a run in between, the last evaluation uses what the stage produced earlier.
    """

    rounds: int
    every_rounds: int

    @property
    def schedule(self) -> Schedule:
        return Schedule("all", periodic_rounds(self.rounds, self.every_rounds))
