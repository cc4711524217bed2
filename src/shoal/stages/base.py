"""What most stages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shoal.types import ClientId, ClientProgram, Plan, Purpose, Report, ServerState


def with_rows(reports: Mapping[ClientId, Report]) -> dict[ClientId, Report]:
    """Of those who could train: a model that comes back as it went, or a choice by no row, says nothing."""
    return {c: r for c, r in reports.items() if r.counts["train"] > 0}


class EveryRound:
    purpose: ClassVar[Purpose] = "pre"

    def due(self, round: int) -> bool:
        return True


class ServerOnly(EveryRound):
    """A step without client work."""

    programs: tuple[ClientProgram, ...] = ()

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan()


class OneProgram:
    """A step whose clients all run the same program."""

    program: ClientProgram
    purpose: ClassVar[Purpose] = "pre"

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        return (self.program,)


class WhenEvaluated:
    """Due in the rounds that are evaluated by plan. A run that a budget ends in between is measured with what there is
    then."""

    rounds: int
    every: int

    def due(self, round: int) -> bool:
        return round + 1 == self.rounds or (round + 1) % self.every == 0
