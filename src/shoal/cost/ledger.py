"""What every client was sent, computed and spent, for every round and stage.

Bytes are counted from what is really sent, work from what was really run (both measured); seconds and joules follow
from the client's device and link (modelled). The server's own seconds are taken from the clock (measured): they differ
from run to run, so they are kept apart and decide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.codec import report_bytes, task_bytes
from shoal.cost.costs import Costs
from shoal.types import CENTRALISED_CLIENT, ClientId, EdgeExchange, Plan, Report, StagePurpose

Column = NDArray[Any]

PARTS = ("pre", "train", "comm")
LONG = "long"  # the link between edges and the cloud
WHOLE = ("bytes_down", "bytes_up", "flops")
REAL = ("compute_s", "radio_s", "compute_joules", "radio_joules", "idle_joules")


@dataclass(frozen=True, eq=False)
class Page:
    """One stage of one round: a row for every client that was asked, by the server or by one edge.

    A page of the long link has a row for every edge that met the cloud.
    """

    round: int  # counts from 1
    stage: str
    purpose: StagePurpose
    clients: tuple[ClientId, ...]
    bytes_down: Column
    bytes_up: Column  # 0: the client was silent
    flops: Column
    compute_s: Column
    radio_s: Column
    compute_joules: Column
    radio_joules: Column
    idle_joules: Column  # while others worked; zeros unless it is asked for
    edge: str = ""  # who asked, where there are edges
    link: str = ""  # LONG, or that of clients

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Page) and self.line() == other.line()

    @property
    def seconds(self) -> Column:
        return self.compute_s + self.radio_s

    @property
    def joules(self) -> Column:
        return self.compute_joules + self.radio_joules + self.idle_joules

    def parts(self) -> dict[str, float]:
        """Joules as the paper splits them."""
        if self.link == LONG:
            return {LONG: float(self.radio_joules.sum())}
        own = float(self.compute_joules.sum() + self.idle_joules.sum())
        return dict.fromkeys(PARTS, 0.0) | {self.purpose: own, "comm": float(self.radio_joules.sum())}

    def line(self) -> dict[str, Any]:
        found = {f.name: v.tolist() if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self)}
        return {k: v for k, v in found.items() if v != ""} | {"clients": list(self.clients)}

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Page:
        columns: dict[str, Any] = {k: np.array(line[k], dtype=np.int64) for k in WHOLE}
        columns |= {k: np.array(line[k], dtype=np.float64) for k in REAL}
        columns |= {k: line.get(k, "") for k in ("edge", "link")}
        return cls(line["round"], line["stage"], line["purpose"], tuple(line["clients"]), **columns)


@dataclass
class EdgeClock:
    """Edges work at the same time: time passes when the edge that is furthest goes on. Where everybody is asked by one
    server, and when edges meet in the cloud, all wait for the last."""

    behind_s: dict[str, float] = field(default_factory=dict)  # the furthest, of edges that went on since all waited
    waited_s: float = 0.0  # since then, for all others

    def passed_s(self, edge: str, lasts_s: float) -> float:
        """By how much the furthest moves when `edge` works so long; "": all together."""
        if not edge:
            self.behind_s, self.waited_s = {}, 0.0
            return lasts_s
        behind = self.behind_s.get(edge, self.waited_s)
        passed = max(0.0, lasts_s - behind)
        self.behind_s = {k: s + passed for k, s in self.behind_s.items()} | {edge: max(0.0, behind - lasts_s)}
        self.waited_s += passed
        return passed


@dataclass
class Ledger:
    """Evaluation is not booked: it measures the run, it is not part of it."""

    costs: Costs = field(default_factory=Costs)
    pages: list[Page] = field(default_factory=list)
    spent_joules: dict[ClientId, float] = field(default_factory=lambda: defaultdict(float))
    total_joules: float = 0.0  # of all clients
    clock: EdgeClock = field(default_factory=lambda: EdgeClock())
    lasted_s: dict[int, float] = field(default_factory=dict)  # of every round, on the clients' devices and links

    def __post_init__(self) -> None:
        pages, self.pages = self.pages, []
        for page in pages:
            self.keep(page)

    def keep(self, page: Page) -> None:
        self.pages.append(page)
        passed_s = self.clock.passed_s(page.edge, self.costs.duration_s(page.seconds))
        self.lasted_s[page.round] = self.lasted_s.get(page.round, 0.0) + passed_s
        if page.link == LONG:
            return  # edges have no batteries
        for client, joules in zip(page.clients, page.joules.tolist(), strict=True):
            self.spent_joules[client] += joules
            self.total_joules += joules

    def book(
        self, round: int, stage: str, purpose: StagePurpose, plan: Plan, reports: Mapping[ClientId, Report]
    ) -> set[ClientId]:
        """Returns the clients whose reports came after the deadline. Where there are edges, each has a page."""
        late: set[ClientId] = set()
        by_edge: dict[str, list[ClientId]] = {}
        for client in plan.tasks:
            by_edge.setdefault(plan.edge_of_client.get(client, ""), []).append(client)
        for edge, clients in by_edge.items():
            tasks = plan.tasks if len(by_edge) == 1 else {c: plan.tasks[c] for c in clients}
            late |= self._book(round, stage, purpose, replace(plan, tasks=tasks), reports, edge)
        return late

    def _book(
        self, round: int, stage: str, purpose: StagePurpose, plan: Plan, reports: Mapping[ClientId, Report], edge: str
    ) -> set[ClientId]:
        down, up, flops, compute, radio = [], [], [], [], []
        for client, task in plan.tasks.items():
            report = reports.get(client)
            messages = (task_bytes(task), report_bytes(report) if report else 0)
            down_bytes, up_bytes = (
                (0, 0) if client == CENTRALISED_CLIENT else messages
            )  # the pool stands in the server's own room
            down.append(down_bytes)
            up.append(up_bytes)
            flops.append(report.flops if report else 0)
            compute.append(self.costs.compute(client, flops[-1]))
            radio.append(self.costs.radio(down_bytes, up_bytes))
        compute_s, compute_joules = _columns(compute)
        radio_s, radio_joules = _columns(radio)
        clients, seconds = tuple(plan.tasks), compute_s + radio_s
        end_s = self.costs.duration_s(seconds)
        idle = self.costs.idle(clients, (end_s - seconds).clip(min=0))
        sent_down, sent_up, worked = (np.array(x, dtype=np.int64) for x in (down, up, flops))
        spent = (compute_s, radio_s, compute_joules, radio_joules, idle)
        page = Page(round, stage, purpose, clients, sent_down, sent_up, worked, *spent, edge=edge)
        self.keep(page)
        return {c for c, s in zip(clients, seconds.tolist(), strict=True) if s > end_s}

    def book_relays(self, round: int, stage: str, purpose: StagePurpose, relays: Mapping[str, EdgeExchange]) -> None:
        """What edges and the cloud sent each other."""
        down = [task_bytes(relay.task) for relay in relays.values()]
        up = [report_bytes(relay.report) for relay in relays.values()]
        seconds, joules = _columns([self.costs.relay(*sizes) for sizes in zip(down, up, strict=True)])
        sent_down, sent_up = (np.array(x, dtype=np.int64) for x in (down, up))
        none, nothing = np.zeros(len(down)), np.zeros(len(down), dtype=np.int64)
        spent = (none, seconds, none, joules, none)
        self.keep(Page(round, stage, purpose, tuple(relays), sent_down, sent_up, nothing, *spent, link=LONG))

    def of(self, round: int) -> list[Page]:
        found = []
        for page in reversed(self.pages):
            if page.round < round:
                break
            found.append(page)
        return found[::-1]

    def by_client(self) -> dict[ClientId, dict[str, float]]:
        """Joules of each client, as the paper splits them."""
        found: dict[ClientId, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))
        for page in (p for p in self.pages if p.link != LONG):
            own = (page.compute_joules + page.idle_joules).tolist()
            for client, work, radio in zip(page.clients, own, page.radio_joules.tolist(), strict=True):
                found[client][page.purpose] += work
                found[client]["comm"] += radio
        return dict(found)


def totals(pages: Iterable[Page]) -> dict[str, float]:
    """Joules of all clients, as the paper splits them; those of the long link too, where there is one."""
    found = dict.fromkeys(PARTS, 0.0)
    for page in pages:
        for part, joules in page.parts().items():
            found[part] = found.get(part, 0.0) + joules
    return found


def _columns(pairs: list[tuple[float, float]]) -> tuple[Column, Column]:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
