"""The bytes, operations, seconds and joules of every client, for every round and stage.

- Bytes and operations are measured: they are counted from the messages that are sent and the steps that are run.
- Seconds and joules are modelled from the client's device and link (`costs.py`).
- The seconds of the server are measured with a clock. They differ from run to run, so they are stored apart and no
  decision uses them.
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

COMMUNICATION = "communication"
ENERGY_PARTS = ("preparation", "training", COMMUNICATION)
EDGE_CLOUD = "cloud_link"  # the link between edge servers and the cloud, and its part of the joules
INTEGER_COLUMNS = ("bytes_down", "bytes_up", "flops")
FLOAT_COLUMNS = ("compute_s", "radio_s", "compute_joules", "radio_joules", "idle_joules")


@dataclass(frozen=True, eq=False)
class LedgerEntry:
    """The cost of one stage in one round, with a row for every client that got a task from the server or from one edge.

    An entry of the edge-cloud link has a row for every edge that exchanged models with the cloud.
    """

    round: int  # counts from 1
    stage: str
    purpose: StagePurpose
    clients: tuple[ClientId, ...]
    bytes_down: Column
    bytes_up: Column  # 0 if the client did not respond
    flops: Column
    compute_s: Column
    radio_s: Column
    compute_joules: Column
    radio_joules: Column
    idle_joules: Column  # while other clients work; zeros unless the job charges waiting
    edge: str = ""  # the edge that sent the tasks; "" without edges
    link: str = ""  # EDGE_CLOUD, or "" for the link of the clients

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LedgerEntry) and self.to_json() == other.to_json()

    @property
    def seconds(self) -> Column:
        """The seconds of each client."""
        return self.compute_s + self.radio_s

    @property
    def joules(self) -> Column:
        """The joules of each client."""
        return self.compute_joules + self.radio_joules + self.idle_joules

    def joules_by_part(self) -> dict[str, float]:
        """Returns the joules of the entry by part: preparation, training and communication, or the cloud link."""
        if self.link == EDGE_CLOUD:
            return {EDGE_CLOUD: float(self.radio_joules.sum())}
        own = float(self.compute_joules.sum() + self.idle_joules.sum())
        return dict.fromkeys(ENERGY_PARTS, 0.0) | {self.purpose: own, COMMUNICATION: float(self.radio_joules.sum())}

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as a line of ledger.jsonl, without an edge or link that is empty."""
        line = {f.name: v.tolist() if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self)}
        return {k: v for k, v in line.items() if v != ""} | {"clients": list(self.clients)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> LedgerEntry:
        """Returns the entry in a line of ledger.jsonl."""
        columns: dict[str, Any] = {k: np.array(line[k], dtype=np.int64) for k in INTEGER_COLUMNS}
        columns |= {k: np.array(line[k], dtype=np.float64) for k in FLOAT_COLUMNS}
        columns |= {k: line.get(k, "") for k in ("edge", "link")}
        return cls(line["round"], line["stage"], line["purpose"], tuple(line["clients"]), **columns)


@dataclass
class EdgeClock:
    """The time of a run in which edges work at the same time.

    The run's time is that of the most advanced edge. Without edges, and when the edges exchange models with the cloud,
    all wait for the last one.
    """

    lag_s: dict[str, float] = field(default_factory=dict)  # behind the run, for edges that worked since all waited
    default_lag_s: float = 0.0  # for all other edges

    def advance(self, edge: str, duration_s: float) -> float:
        """Returns by how much the run's time moves when `edge` works for this long; "" means all edges together."""
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
    """The costs of a run so far. Evaluation is not recorded, because it measures the run and is not part of it."""

    costs: CostModel = field(default_factory=CostModel)
    entries: list[LedgerEntry] = field(default_factory=list)
    spent_joules: dict[ClientId, float] = field(default_factory=lambda: defaultdict(float))
    total_joules: float = 0.0  # of all clients
    edge_clock: EdgeClock = field(default_factory=lambda: EdgeClock())
    round_duration_s: dict[int, float] = field(default_factory=dict)  # by round, on the clients' devices and links

    def __post_init__(self) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            self.append(entry)

    def append(self, entry: LedgerEntry) -> None:
        """Adds an entry, with its joules and its duration."""
        self.entries.append(entry)
        elapsed_s = self.edge_clock.advance(entry.edge, self.costs.duration_s(entry.seconds))
        self.round_duration_s[entry.round] = self.round_duration_s.get(entry.round, 0.0) + elapsed_s
        if entry.link == EDGE_CLOUD:
            return  # the joules of the edge-cloud link are not those of clients
        for client, joules in zip(entry.clients, entry.joules.tolist(), strict=True):
            self.spent_joules[client] += joules
            self.total_joules += joules

    def record_stage(
        self, round_index: int, stage: str, purpose: StagePurpose, plan: Plan, reports: Mapping[ClientId, Report]
    ) -> set[ClientId]:
        """Records the cost of a stage, with one entry per edge.

        Parameters
        ----------
        round_index : int
            The round, counted from 1.
        stage : str
            Name of the stage.
        purpose : StagePurpose
            Whether the stage prepares or trains.
        plan : Plan
            The tasks that were sent.
        reports : Mapping[ClientId, Report]
            The reports that were received.

        Returns
        -------
        set[ClientId]
            The clients whose reports came after the deadline.
        """
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
            # Centralised training happens at the server, so nothing is sent.
            down_bytes, up_bytes = (0, 0) if client == CENTRALISED_CLIENT else messages
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
        self.append(LedgerEntry(round_index, stage, purpose, clients, sent_down, sent_up, num_flops, *spent, edge=edge))
        return {c for c, s in zip(clients, seconds.tolist(), strict=True) if s > end_s}

    def record_edge_exchanges(
        self, round_index: int, stage: str, purpose: StagePurpose, edge_exchanges: Mapping[str, EdgeExchange]
    ) -> None:
        """Records what edges and the cloud sent each other, with a row per edge."""
        down = [task_bytes(exchange.task) for exchange in edge_exchanges.values()]
        up = [report_bytes(exchange.report) for exchange in edge_exchanges.values()]
        seconds, joules = _columns([self.costs.edge_cloud_cost(*sizes) for sizes in zip(down, up, strict=True)])
        sent_down, sent_up = (np.array(x, dtype=np.int64) for x in (down, up))
        no_cost, no_flops = np.zeros(len(down)), np.zeros(len(down), dtype=np.int64)
        work = (sent_down, sent_up, no_flops)
        spent = (no_cost, seconds, no_cost, joules, no_cost)
        edges = tuple(edge_exchanges)
        self.append(LedgerEntry(round_index, stage, purpose, edges, *work, *spent, link=EDGE_CLOUD))

    def of_round(self, round_index: int) -> list[LedgerEntry]:
        """Returns the entries of this round and of later ones, in order."""
        entries = []
        for entry in reversed(self.entries):
            if entry.round < round_index:
                break
            entries.append(entry)
        return entries[::-1]

    def joules_by_client(self) -> dict[ClientId, dict[str, float]]:
        """Returns the joules of each client by part. The edge-cloud link is not a part of any client."""
        joules_by_client: dict[ClientId, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ENERGY_PARTS, 0.0))
        for entry in (e for e in self.entries if e.link != EDGE_CLOUD):
            own = (entry.compute_joules + entry.idle_joules).tolist()
            for client, work, radio in zip(entry.clients, own, entry.radio_joules.tolist(), strict=True):
                joules_by_client[client][entry.purpose] += work
                joules_by_client[client][COMMUNICATION] += radio
        return dict(joules_by_client)


def total_joules_by_part(entries: Iterable[LedgerEntry]) -> dict[str, float]:
    """Returns the joules of all clients by part, and those of the edge-cloud link if there is one."""
    joules_by_part = dict.fromkeys(ENERGY_PARTS, 0.0)
    for entry in entries:
        for part, joules in entry.joules_by_part().items():
            joules_by_part[part] = joules_by_part.get(part, 0.0) + joules
    return joules_by_part


def _columns(pairs: list[tuple[float, float]]) -> tuple[Column, Column]:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
