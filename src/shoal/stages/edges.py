"""Clients under edges, edges under a cloud: every stage of a method at each edge for its own clients, and the cloud
that brings the edges' models together every so many rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import tree
from shoal.client_table import ClientTable
from shoal.clusterers.jensen_shannon import modified_js
from shoal.errors import UserError
from shoal.rng import derive_seed, generator
from shoal.stages.base import CLUSTERING_LIBRARIES, Scheduled, ServerOnly
from shoal.types import (
    ClientId,
    ClientProgram,
    EdgeExchange,
    Params,
    Plan,
    Report,
    Schedule,
    ServerState,
    Stage,
    StagePurpose,
    Task,
    periodic_rounds,
)

EDGES, CLOUD, EDGE_LABEL_STAGE = "edges", "cloud", "whereabouts"
Labels = NDArray[np.int64]
EdgeAssignment = Literal["chance", "alike", "mixed", "place"]


@dataclass(frozen=True)
class Topology:
    """How many edges there are, whose clients they have, and how often they meet in the cloud.

    Clients belong to an edge by chance, together with those whose labels are alike, with those whose labels make up for
    theirs (mixed), or by the place where they are.
    """

    num_edges: int = 5
    assignment: EdgeAssignment = "chance"
    cloud_every_rounds: int = 5
    column_values: Mapping[ClientId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_edges < 1:
            raise UserError(f"edges is {self.num_edges}; there must be 1 or more")
        if self.cloud_every_rounds < 1:
            raise UserError(f"cloud_every is {self.cloud_every_rounds}; it must be 1 round or more")

    @property
    def requires_labels(self) -> bool:
        """Whether clients must tell their labels before they have an edge."""
        return self.assignment in ("alike", "mixed")


def parse_edges(text: str, column_values: Mapping[ClientId, str]) -> tuple[int, EdgeAssignment]:
    """How many, and who is together: 5 or chance:5, alike:5, mixed:5, or place."""
    kinds: dict[str, EdgeAssignment] = {"chance": "chance", "alike": "alike", "mixed": "mixed"}
    kind, colon, number = text.strip().rpartition(":")
    if text.strip() == "place":
        return max(1, len(set(column_values.values()))), "place"
    if (colon and kind not in kinds) or not number.isdecimal() or not int(number):
        raise UserError(
            f"edges is {text!r}; it must be how many there are, such as 5, and may say who is together: chance:5, "
            "alike:5 or mixed:5; or place, where the data say it"
        )
    return int(number), kinds[kind or "chance"]


def edge_name(index: int) -> str:
    return f"edge-{index:03d}"


def edge_seed(seed: int, index: int) -> int:
    """The first edge has the server's own: a single edge is no edge."""
    return derive_seed(seed, "edge", index) if index else seed


def edge_states(state: ServerState) -> list[ServerState]:
    """What each edge knows: its clients, its models and what its stages remember."""
    known = ClientTable.load(state, EDGES)
    if not len(known):
        return []
    edge_of_client = dict(zip(known.clients, known["edge"].tolist(), strict=True))
    count = max(edge_of_client.values()) + 1
    share = np.bincount(list(edge_of_client.values()), minlength=count) / len(edge_of_client)
    models: list[dict[str, Params]] = [{} for _ in range(count)]
    for name, model in state.models.items():
        edge, _, own = name.partition("/")
        models[int(edge.removeprefix("edge-"))][own] = model
    ends = np.cumsum([len(m) for m in models]).tolist()
    inside: list[dict[str, list[ClientId]]] = [{"roster": [], "cohort": []} for _ in range(count)]
    for part, clients in (("roster", state.roster), ("cohort", state.cohort)):
        for client in clients:
            if client in edge_of_client:
                inside[edge_of_client[client]][part].append(client)
    members: list[dict[ClientId, torch.Tensor]] = [{} for _ in range(count)]
    for client, weights in state.membership.items():
        k = edge_of_client[client]
        members[k][client] = weights[ends[k] - len(models[k]) : ends[k]]
    return [
        replace(
            state,
            models=models[k],
            membership=members[k],
            roster=tuple(inside[k]["roster"]),
            cohort=tuple(inside[k]["cohort"]),
            cohort_size=max(1, int(state.cohort_size * share[k] + 1e-9)),
            memory=state.memory.get(edge_name(k), {}),
            round_metrics={},
        )
        for k in range(count)
    ]


def merge_edge_states(state: ServerState, edges: Sequence[ServerState]) -> ServerState:
    """`state` with what the edges know now."""
    names = [{name: f"{edge_name(k)}/{name}" for name in edge.models} for k, edge in enumerate(edges)]
    models = {names[k][name]: model for k, edge in enumerate(edges) for name, model in edge.models.items()}
    starts = np.cumsum([0, *(len(edge.models) for edge in edges)]).tolist()
    membership = {}
    for k, edge in enumerate(edges):
        for client, weights in edge.membership.items():
            membership[client] = torch.zeros(starts[-1])
            membership[client][starts[k] : starts[k + 1]] = weights
    figures = {f"{edge_name(k)}.{name}": x for k, edge in enumerate(edges) for name, x in edge.round_metrics.items()}
    return replace(
        state,
        models=models,
        membership=membership,
        cohort=tuple(sorted({c for edge in edges for c in edge.cohort})),
        memory={**state.memory, **{edge_name(k): dict(edge.memory) for k, edge in enumerate(edges)}},
        round_metrics={**state.round_metrics, **figures},
    )


@dataclass(frozen=True)
class AssignEdges(ServerOnly):
    """Who comes gets an edge and stays there. The first come are divided by the topology's rule; who comes later goes
    to the edge with the fewest clients, or to the one whose labels are most like its own."""

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    topology: Topology
    name: str = EDGES

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        known = ClientTable.load(state, EDGES)
        new = self._unassigned(state, known)
        if not new:
            return state
        if not len(known) and len(new) < self.topology.num_edges and self.topology.assignment != "place":
            raise UserError(f"edges is {self.topology.num_edges}, but there are only {len(new)} clients to divide")
        labels = (
            self._assign_first_clients(state, new, seed)
            if not len(known)
            else self._assign_late_clients(state, known, new)
        )
        rows = {c: {"edge": torch.tensor(k), "rows": torch.tensor(0)} for c, k in zip(new, labels, strict=True)}
        after = replace(
            state, memory={**state.memory, EDGES: known.updated_with(ClientTable.from_rows(rows)).to_tree()}
        )
        return after if len(known) else _open_edges(after, state)

    def _unassigned(self, state: ServerState, known: ClientTable) -> list[ClientId]:
        have = set(known.clients)
        new = [c for c in sorted(state.roster) if c not in have]
        if not self.topology.requires_labels:
            return new
        told = set(ClientTable.load(state, EDGE_LABEL_STAGE).clients)
        return [c for c in new if c in told]

    def _assign_first_clients(self, state: ServerState, clients: Sequence[ClientId], seed: int) -> list[int]:
        count = self.topology.num_edges
        if self.topology.assignment == "place":
            return self._edges_by_column(clients)
        if self.topology.assignment == "chance":
            order = torch.randperm(len(clients), generator=generator(seed)).tolist()
            return [order[i] % count for i in range(len(clients))]
        from shoal.clusterers import RepulsiveClusters, SimilarClusters

        rule = SimilarClusters if self.topology.assignment == "alike" else RepulsiveClusters
        return [int(k) for k in rule(count, random_state=seed).fit(_label_distributions(state, clients)).labels_]

    def _edges_by_column(self, clients: Sequence[ClientId]) -> list[int]:
        places = self.topology.column_values
        for client in clients:
            if client not in places:
                raise UserError(f"client {client!r} has no edge; the data must name one for every client")
        order = {place: k for k, place in enumerate(sorted(set(places.values())))}
        return [order[places[c]] for c in clients]

    def _assign_late_clients(self, state: ServerState, known: ClientTable, clients: Sequence[ClientId]) -> list[int]:
        edges = known["edge"].numpy()
        if self.topology.assignment == "place":
            return self._edges_by_column(clients)
        if self.topology.assignment == "alike":
            apart = modified_js(_label_distributions(state, clients), _label_distributions(state, known.clients))
            means = np.stack([apart[:, edges == k].mean(axis=1) for k in range(edges.max() + 1)], axis=1)
            return [int(k) for k in means.argmin(axis=1)]
        sizes, found = np.bincount(edges), []
        for _ in clients:
            found.append(int(sizes.argmin()))
            sizes[found[-1]] += 1
        return found


def _label_distributions(state: ServerState, clients: Sequence[ClientId]) -> NDArray[np.float64]:
    reported = ClientTable.load(state, EDGE_LABEL_STAGE)
    row_of_client = {c: i for i, c in enumerate(reported.clients)}
    return reported["labels"].double().numpy()[[row_of_client[c] for c in clients]]


def _open_edges(state: ServerState, first: ServerState) -> ServerState:
    """Every edge, and the cloud, with the very first models."""
    count = int(ClientTable.load(state, EDGES)["edge"].max()) + 1
    begin = replace(
        first, memory={k: v for k, v in first.memory.items() if k not in (EDGES, EDGE_LABEL_STAGE)}, round_metrics={}
    )
    cloud = {"models": dict(first.models), "reference": torch.tensor(0)}
    return merge_edge_states(replace(state, memory={**state.memory, CLOUD: cloud}), [begin] * count)


@dataclass(frozen=True)
class RunAtEdges(Scheduled):
    """A stage of a method, played by every edge for its own clients. An edge's cohort is its share of the whole one by
    its number of clients, one client at least."""

    stage: Stage

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def purpose(self) -> StagePurpose:
        return self.stage.purpose

    @property
    def programs(self) -> tuple[ClientProgram, ...]:
        return self.stage.programs

    @property
    def imports_later(self) -> tuple[str, ...]:  # type: ignore[override]
        return getattr(self.stage, "imports_later", ())

    @property
    def schedule(self) -> Schedule:
        return self.stage.schedule

    def plan(self, state: ServerState, seed: int) -> Plan:
        plans = {edge_name(k): self.stage.plan(edge, edge_seed(seed, k)) for k, edge in enumerate(edge_states(state))}
        asked = [(edge, client) for edge, plan in plans.items() for client in plan.tasks]
        if not asked:
            return Plan()
        first = plans[asked[0][0]]
        return Plan(
            first.program,
            {client: plans[edge].tasks[client] for edge, client in asked},
            first.cache_models,
            edge_of_client={client: edge for edge, client in asked},
            program_of_client={
                client: p for edge, client in asked if (p := plans[edge].program) and p != first.program
            },
        )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        edges, edge_of_client = edge_states(state), self._edge_of_client(state)
        reports_by_edge: list[dict[ClientId, Report]] = [{} for _ in edges]
        for client, report in reports.items():
            reports_by_edge[edge_of_client[client]][client] = report
        after = [self.stage.fold(edge, reports_by_edge[k], edge_seed(seed, k)) for k, edge in enumerate(edges)]
        return merge_edge_states(_record_sample_counts(state, reports), after) if edges else state

    def _edge_of_client(self, state: ServerState) -> dict[ClientId, int]:
        known = ClientTable.load(state, EDGES)
        return dict(zip(known.clients, known["edge"].tolist(), strict=True)) if len(known) else {}


def _record_sample_counts(state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
    """How many rows clients train on, as they last told."""
    known, num_samples = (
        ClientTable.load(state, EDGES),
        {c: r.counts["train"] for c, r in reports.items() if "train" in r.counts},
    )
    if not num_samples:
        return state
    rows = [num_samples.get(c, had) for c, had in zip(known.clients, known["rows"].tolist(), strict=True)]
    table = ClientTable(known.clients, {**known.columns, "rows": torch.tensor(rows)})
    return replace(state, memory={**state.memory, EDGES: table.to_tree()})


@dataclass(frozen=True)
class AverageEdgeModels(ServerOnly):
    """Every so many rounds, and after the last, the edges' models become their mean, weighed by the rows of the edges'
    clients, as far as these are known.

    Where edges have several models, these bear no common names: the edge with most of them is the reference, and each
    model of another edge counts as the one of these that it is closest to, weighed by its share of its edge's clients.
    """

    every_rounds: int
    rounds: int = 0  # of the run; 0: it has no end
    name: str = CLOUD
    purpose: ClassVar[StagePurpose] = "train"

    @property
    def schedule(self) -> Schedule:
        return Schedule("edges", periodic_rounds(self.rounds, self.every_rounds))

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        edges, known = edge_states(state), ClientTable.load(state, EDGES)
        if not len(known) or not int(known["rows"].sum()):
            return state
        rows = np.bincount(known["edge"].numpy(), known["rows"].numpy(), len(edges)).astype(np.float64)
        reference = max(range(len(edges)), key=lambda k: (len(edges[k].models), rows[k], -k))
        closest = [
            {name: _closest_model(model, edges[reference].models) for name, model in e.models.items()} for e in edges
        ]
        closest[reference] = {name: name for name in edges[reference].models}
        cloud = {name: self._mean(name, edges, closest, rows) for name in edges[reference].models}
        sent = [{name: cloud[of] for name, of in closest[k].items()} for k in range(len(edges))]
        relays = {
            edge_name(k): EdgeExchange(Report(edge.models, counts={"train": int(rows[k])}), Task(sent[k]))
            for k, edge in enumerate(edges)
        }
        after = merge_edge_states(state, [replace(edge, models=sent[k]) for k, edge in enumerate(edges)])
        kept = {"models": cloud, "reference": torch.tensor(reference)}
        return replace(after, memory={**after.memory, CLOUD: kept}, edge_exchanges=relays)

    def _mean(
        self, name: str, edges: Sequence[ServerState], closest: Sequence[Mapping[str, str]], rows: NDArray[np.float64]
    ) -> Params:
        found = [
            (rows[k] * share, edge.models[own])
            for k, edge in enumerate(edges)
            for own, share in _client_fraction_by_model(edge).items()
            if closest[k][own] == name and rows[k] * share > 0
        ]
        if not found:  # nobody has trained it
            return next(
                edge.models[own] for k, edge in enumerate(edges) for own in closest[k] if closest[k][own] == name
            )
        return tree.weighted_mean([model for _, model in found], [weight for weight, _ in found])


def _closest_model(model: Params, candidates: Mapping[str, Params]) -> str:
    def apart(other: Params) -> float:
        floats = [k for k, x in model.items() if x.is_floating_point()]
        return sum(float((model[k].double() - other[k].double()).square().sum()) for k in floats)

    return min(sorted(candidates), key=lambda name: apart(candidates[name]))


def _client_fraction_by_model(edge: ServerState) -> dict[str, float]:
    """Of an edge's clients, by its models; the same for all where there are no groups."""
    names = sorted(edge.models)
    if not edge.membership:
        return dict.fromkeys(names, 1 / len(names))
    sizes = torch.stack(list(edge.membership.values())).double().sum(0)
    return dict(zip(names, (sizes / sizes.sum()).tolist(), strict=True))
