"""Bytes of what is really sent, for every client, round and stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.codec import report_bytes, task_bytes
from shoal.types import POOL, ClientId, Plan, Report


@dataclass(frozen=True)
class Entry:
    round: int  # counts from 1
    stage: str
    client: ClientId
    bytes_down: int
    bytes_up: int  # 0: the client was silent


@dataclass
class Ledger:
    """Evaluation is not booked: it measures the run, it is not part of it."""

    rounds: dict[int, list[Entry]] = field(default_factory=dict)

    def book(self, round: int, stage: str, plan: Plan, reports: Mapping[ClientId, Report]) -> None:
        page = self.rounds.setdefault(round, [])
        for client, task in plan.tasks.items():
            if client == POOL:
                continue  # the pool stands in the server's own room
            up = report_bytes(reports[client]) if client in reports else 0
            page.append(Entry(round, stage, client, task_bytes(task), up))

    @property
    def entries(self) -> list[Entry]:
        return [entry for page in self.rounds.values() for entry in page]

    def totals(self, round: int) -> tuple[int, int]:
        """(down, up) of one round."""
        page = self.rounds.get(round, [])
        return sum(e.bytes_down for e in page), sum(e.bytes_up for e in page)
