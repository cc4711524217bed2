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
from shoal.cost.costs import CostModel
from shoal.types import CENTRALISED_CLIENT, ClientId, EdgeExchange, Plan, Report, StagePurpose

Column = NDArray[Any]

ENERGY_PARTS = ("pre", "train", "comm")
EDGE_CLOUD = "long"  # the link between edges and the cloud
INTEGER_COLUMNS = ("bytes_down", "bytes_up", "flops")
FLOAT_COLUMNS = ("compute_s", "radio_s", "compute_joules", "radio_joules", "idle_joules")


@dataclass(frozen=True, eq=False)
class LedgerEntry:
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
        return isinstance(other, LedgerEntry) and self.to_json() == other.to_json()

    @property
    def seconds(self) -> Column:
        return self.compute_s + self.radio_s

    @property
    def joules(self) -> Column:
        return self.compute_joules + self.radio_joules + self.idle_joules

    def joules_by_part(self) -> dict[str, float]:
        """Joules as the paper splits them."""
        if self.link == EDGE_CLOUD:
            return {EDGE_CLOUD: float(self.radio_joules.sum())}
        own = float(self.compute_joules.sum() + self.idle_joules.sum())
        return dict.fromkeys(ENERGY_PARTS, 0.0) | {self.purpose: own, "comm": float(self.radio_joules.sum())}

    def to_json(self) -> dict[str, Any]:
        found = {f.name: v.tolist() if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self)}
        return {k: v for k, v in found.items() if v != ""} | {"clients": list(self.clients)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> LedgerEntry:
        columns: dict[str, Any] = {k: np.array(line[k], dtype=np.int64) for k in INTEGER_COLUMNS}
        columns |= {k: np.array(line[k], dtype=np.float64) for k in FLOAT_COLUMNS}
        columns |= {k: line.get(k, "") for k in ("edge", "link")}
        return cls(line["round"], line["stage"], line["purpose"], tuple(line["clients"]), **columns)


@dataclass
class EdgeClock:
    """Edges work at the same time: time passes when the edge that is furthest goes on. Where everybody is asked by one
    server, and when edges meet in the cloud, all wait for the last."""

    lag_s: dict[str, float] = field(default_factory=dict)  # the furthest, of edges that went on since all waited
    default_lag_s: float = 0.0  # since then, for all others

    def advance(self, edge: str, duration_s: float) -> float:
        """By how much the furthest moves when `edge` works so long; "": all together."""
        if not edge:
            self.lag_s, self.default_lag_s = {}, 0.0
            return duration_s
        edge_lag_s = self.lag_s.get(edge, self.default_lag_s)
        elapsed_s = max(0.0, duration_s - edge_lag_s)
        self.lag_s = {k: s + elapsed_s for k, s in self.lag_s.items()} | {edge: max(0.0, edge_lag_s - duration_s)}
        self.default_lag_s += elapsed_s
        return elapsed_s


@dataclass
class Ledger:
    """Evaluation is not booked: it measures the run, it is not part of it."""

    costs: CostModel = field(default_factory=CostModel)
    entries: list[LedgerEntry] = field(default_factory=list)
    spent_joules: dict[ClientId, float] = field(default_factory=lambda: defaultdict(float))
    total_joules: float = 0.0  # of all clients
    edge_clock: EdgeClock = field(default_factory=lambda: EdgeClock())
    round_duration_s: dict[int, float] = field(
        default_factory=dict
    )  # of every round, on the clients' devices and links

    def __post_init__(self) -> None:
        pages, self.entries = self.entries, []
        for page in pages:
            self.append(page)

    def append(self, entry: LedgerEntry) -> None:
        self.entries.append(entry)
        passed_s = self.edge_clock.advance(entry.edge, self.costs.duration_s(entry.seconds))
        self.round_duration_s[entry.round] = self.round_duration_s.get(entry.round, 0.0) + passed_s
        if entry.link == EDGE_CLOUD:
            return  # edges have no batteries
        for client, joules in zip(entry.clients, entry.joules.tolist(), strict=True):
            self.spent_joules[client] += joules
            self.total_joules += joules

    def record_stage(
        self, round_index: int, stage: str, purpose: StagePurpose, plan: Plan, reports: Mapping[ClientId, Report]
    ) -> set[ClientId]:
        """Returns the clients whose reports came after the deadline. Where there are edges, each has a page."""
        late: set[ClientId] = set()
        by_edge: dict[str, list[ClientId]] = {}
        for client in plan.tasks:
            by_edge.setdefault(plan.edge_of_client.get(client, ""), []).append(client)
        for edge, clients in by_edge.items():
            tasks = plan.tasks if len(by_edge) == 1 else {c: plan.tasks[c] for c in clients}
            late |= self._record_edge(round_index, stage, purpose, replace(plan, tasks=tasks), reports, edge)
        return late

    def _record_edge(
        self,
        round_index: int,
        stage: str,
        purpose: StagePurpose,
        plan: Plan,
        reports: Mapping[ClientId, Report],
        edge: str,
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
            compute.append(self.costs.compute_cost(client, flops[-1]))
            radio.append(self.costs.radio_cost(down_bytes, up_bytes))
        compute_s, compute_joules = _columns(compute)
        radio_s, radio_joules = _columns(radio)
        clients, seconds = tuple(plan.tasks), compute_s + radio_s
        end_s = self.costs.duration_s(seconds)
        idle = self.costs.idle_joules(clients, (end_s - seconds).clip(min=0))
        sent_down, sent_up, num_flops = (np.array(x, dtype=np.int64) for x in (down, up, flops))
        spent = (compute_s, radio_s, compute_joules, radio_joules, idle)
        page = LedgerEntry(round_index, stage, purpose, clients, sent_down, sent_up, num_flops, *spent, edge=edge)
        self.append(page)
        return {c for c, s in zip(clients, seconds.tolist(), strict=True) if s > end_s}

    def record_edge_exchanges(
        self, round_index: int, stage: str, purpose: StagePurpose, edge_exchanges: Mapping[str, EdgeExchange]
    ) -> None:
        """What edges and the cloud sent each other."""
        down = [task_bytes(relay.task) for relay in edge_exchanges.values()]
        up = [report_bytes(relay.report) for relay in edge_exchanges.values()]
        seconds, joules = _columns([self.costs.edge_cloud_cost(*sizes) for sizes in zip(down, up, strict=True)])
        sent_down, sent_up = (np.array(x, dtype=np.int64) for x in (down, up))
        none, nothing = np.zeros(len(down)), np.zeros(len(down), dtype=np.int64)
        spent = (none, seconds, none, joules, none)
        self.append(
            LedgerEntry(
                round_index, stage, purpose, tuple(edge_exchanges), sent_down, sent_up, nothing, *spent, link=EDGE_CLOUD
            )
        )

    def of_round(self, round_index: int) -> list[LedgerEntry]:
        entries = []
        for page in reversed(self.entries):
            if page.round < round_index:
                break
            entries.append(page)
        return entries[::-1]

    def joules_by_client(self) -> dict[ClientId, dict[str, float]]:
        """Joules of each client, as the paper splits them."""
        joules_by_client: dict[ClientId, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ENERGY_PARTS, 0.0))
        for page in (p for p in self.entries if p.link != EDGE_CLOUD):
            own = (page.compute_joules + page.idle_joules).tolist()
            for client, work, radio in zip(page.clients, own, page.radio_joules.tolist(), strict=True):
                joules_by_client[client][page.purpose] += work
                joules_by_client[client]["comm"] += radio
        return dict(joules_by_client)


def total_joules_by_part(entries: Iterable[LedgerEntry]) -> dict[str, float]:
    """Joules of all clients, as the paper splits them; those of the long link too, where there is one."""
    joules_by_part = dict.fromkeys(ENERGY_PARTS, 0.0)
    for page in entries:
        for part, joules in page.joules_by_part().items():
            joules_by_part[part] = joules_by_part.get(part, 0.0) + joules
    return joules_by_part


def _columns(pairs: list[tuple[float, float]]) -> tuple[Column, Column]:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
