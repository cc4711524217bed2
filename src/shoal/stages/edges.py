"""Edge servers between the clients and the cloud.

Each edge server (edge) runs every stage of a method for its own clients. The cloud averages the models of the edges
every `cloud_every_rounds` rounds.
"""

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
EdgeAssignment = Literal["random", "similar", "diverse", "column"]


@dataclass(frozen=True)
class Topology:
    """The number of edges, the rule that assigns clients to them, and how often the cloud averages their models.

    Clients are assigned at random (`random`), together with clients of similar label distributions (`similar`), so
    that each edge has different label distributions (`diverse`), or by a column of the data (`column`).
    """

    num_edges: int = 5
    assignment: EdgeAssignment = "random"
    cloud_every_rounds: int = 5
    column_values: Mapping[ClientId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_edges < 1:
            raise UserError(f"edges is {self.num_edges}; there must be 1 or more")
        if self.cloud_every_rounds < 1:
            raise UserError(f"cloud_every_rounds is {self.cloud_every_rounds}; it must be 1 round or more")

    @property
    def requires_labels(self) -> bool:
        """Whether clients must report their label distributions before they are assigned."""
        return self.assignment in ("similar", "diverse")


def parse_edges(text: str, column_values: Mapping[ClientId, str]) -> tuple[int, EdgeAssignment]:
    """Returns the number of edges and their rule from 5, random:5, similar:5, diverse:5 or column."""
    rules: dict[str, EdgeAssignment] = {"random": "random", "similar": "similar", "diverse": "diverse"}
    rule, colon, number = text.strip().rpartition(":")
    if text.strip() == "column":
        return max(1, len(set(column_values.values()))), "column"
    if (colon and rule not in rules) or not number.isdecimal() or not int(number):
        raise UserError(
            f"edges is {text!r}. It must be the number of edge servers, such as 5, or a rule and a number, such as "
            "random:5, similar:5 or diverse:5. If the data name the edge of every client, it may be column."
        )
    return int(number), rules[rule or "random"]


def edge_name(index: int) -> str:
    """Returns the name of an edge."""
    return f"edge-{index:03d}"


def edge_seed(seed: int, index: int) -> int:
    """Returns the seed of an edge. The first edge has the server's seed, so that a single edge changes nothing."""
    return derive_seed(seed, "edge", index) if index else seed


def edge_states(state: ServerState) -> list[ServerState]:
    """Returns the state of each edge: its clients, its models and the memory of its stages."""
    assigned = ClientTable.load(state, EDGES)
    if not len(assigned):
        return []
    edge_of_client = assigned.to_dict("edge")
    count = max(edge_of_client.values()) + 1
    client_fraction = np.bincount(list(edge_of_client.values()), minlength=count) / len(edge_of_client)
    models: list[dict[str, Params]] = [{} for _ in range(count)]
    for name, model in state.models.items():
        edge, _, own = name.partition("/")
        models[int(edge.removeprefix("edge-"))][own] = model
    ends = np.cumsum([len(m) for m in models]).tolist()
    clients_by_edge: list[dict[str, list[ClientId]]] = [{"roster": [], "cohort": []} for _ in range(count)]
    for part, clients in (("roster", state.roster), ("cohort", state.cohort)):
        for client in clients:
            if client in edge_of_client:
                clients_by_edge[edge_of_client[client]][part].append(client)
    members: list[dict[ClientId, torch.Tensor]] = [{} for _ in range(count)]
    for client, weights in state.membership.items():
        k = edge_of_client[client]
        members[k][client] = weights[ends[k] - len(models[k]) : ends[k]]
    return [
        replace(
            state,
            models=models[k],
            membership=members[k],
            roster=tuple(clients_by_edge[k]["roster"]),
            cohort=tuple(clients_by_edge[k]["cohort"]),
            cohort_size=max(1, int(state.cohort_size * client_fraction[k] + 1e-9)),
            memory=state.memory.get(edge_name(k), {}),
            round_metrics={},
        )
        for k in range(count)
    ]


def merge_edge_states(state: ServerState, edges: Sequence[ServerState]) -> ServerState:
    """Returns the server state with the states of the edges, the inverse of `edge_states`."""
    names = [{name: f"{edge_name(k)}/{name}" for name in edge.models} for k, edge in enumerate(edges)]
    models = {names[k][name]: model for k, edge in enumerate(edges) for name, model in edge.models.items()}
    starts = np.cumsum([0, *(len(edge.models) for edge in edges)]).tolist()
    membership = {}
    for k, edge in enumerate(edges):
        for client, weights in edge.membership.items():
            membership[client] = torch.zeros(starts[-1])
            membership[client][starts[k] : starts[k + 1]] = weights
    metrics = {
        f"{edge_name(k)}.{name}": value for k, edge in enumerate(edges) for name, value in edge.round_metrics.items()
    }
    return replace(
        state,
        models=models,
        membership=membership,
        cohort=tuple(sorted({c for edge in edges for c in edge.cohort})),
        memory={**state.memory, **{edge_name(k): dict(edge.memory) for k, edge in enumerate(edges)}},
        round_metrics={**state.round_metrics, **metrics},
    )


@dataclass(frozen=True)
class AssignEdges(ServerOnly):
    """Assigns each new client to an edge, which it keeps.

    The first clients are assigned by the rule of the topology. A late-joining client goes to the edge with the most
    similar label distributions if the rule is `similar`, by its column if the rule is `column`, and otherwise to the
    edge with the fewest clients.
    """

    imports_later: ClassVar[tuple[str, ...]] = CLUSTERING_LIBRARIES

    topology: Topology
    name: str = EDGES

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        assigned = ClientTable.load(state, EDGES)
        new = self._unassigned(state, assigned)
        if not new:
            return state
        if not len(assigned) and len(new) < self.topology.num_edges and self.topology.assignment != "column":
            raise UserError(
                f"edges is {self.topology.num_edges}, but there are only {len(new)} clients. Use fewer edge servers."
            )
        edge_indices = (
            self._assign_first_clients(state, new, seed)
            if not len(assigned)
            else self._assign_late_clients(state, assigned, new)
        )
        rows = {c: {"edge": torch.tensor(k), "rows": torch.tensor(0)} for c, k in zip(new, edge_indices, strict=True)}
        after = replace(
            state, memory={**state.memory, EDGES: assigned.updated_with(ClientTable.from_rows(rows)).to_tree()}
        )
        return after if len(assigned) else _open_edges(after, state)

    def _unassigned(self, state: ServerState, assigned: ClientTable) -> list[ClientId]:
        assigned_clients = set(assigned.clients)
        new = [c for c in sorted(state.roster) if c not in assigned_clients]
        if not self.topology.requires_labels:
            return new
        reported_clients = set(ClientTable.load(state, EDGE_LABEL_STAGE).clients)
        return [c for c in new if c in reported_clients]

    def _assign_first_clients(self, state: ServerState, clients: Sequence[ClientId], seed: int) -> list[int]:
        count = self.topology.num_edges
        if self.topology.assignment == "column":
            return self._edges_by_column(clients)
        if self.topology.assignment == "random":
            order = torch.randperm(len(clients), generator=generator(seed)).tolist()
            return [order[i] % count for i in range(len(clients))]
        from shoal.clusterers import RepulsiveClusters, SimilarClusters

        rule = SimilarClusters if self.topology.assignment == "similar" else RepulsiveClusters
        return [int(k) for k in rule(count, random_state=seed).fit(_label_distributions(state, clients)).labels_]

    def _edges_by_column(self, clients: Sequence[ClientId]) -> list[int]:
        column_values = self.topology.column_values
        for client in clients:
            if client not in column_values:
                raise UserError(f"Client {client!r} has no edge server. The data must name one for every client.")
        edge_of_value = {value: k for k, value in enumerate(sorted(set(column_values.values())))}
        return [edge_of_value[column_values[c]] for c in clients]

    def _assign_late_clients(self, state: ServerState, assigned: ClientTable, clients: Sequence[ClientId]) -> list[int]:
        edges = assigned["edge"].numpy()
        if self.topology.assignment == "column":
            return self._edges_by_column(clients)
        if self.topology.assignment == "similar":
            distances = modified_js(_label_distributions(state, clients), _label_distributions(state, assigned.clients))
            means = np.stack([distances[:, edges == k].mean(axis=1) for k in range(edges.max() + 1)], axis=1)
            return [int(k) for k in means.argmin(axis=1)]
        sizes, assignment = np.bincount(edges), []
        for _ in clients:
            assignment.append(int(sizes.argmin()))
            sizes[assignment[-1]] += 1
        return assignment


def _label_distributions(state: ServerState, clients: Sequence[ClientId]) -> NDArray[np.float64]:
    reported = ClientTable.load(state, EDGE_LABEL_STAGE)
    row_of_client = {c: i for i, c in enumerate(reported.clients)}
    return reported["labels"].double().numpy()[[row_of_client[c] for c in clients]]


def _open_edges(state: ServerState, first: ServerState) -> ServerState:
    """Returns the state in which every edge and the cloud have the initial models."""
    count = int(ClientTable.load(state, EDGES)["edge"].max()) + 1
    first_edge_state = replace(
        first, memory={k: v for k, v in first.memory.items() if k not in (EDGES, EDGE_LABEL_STAGE)}, round_metrics={}
    )
    cloud = {"models": dict(first.models), "reference": torch.tensor(0)}
    return merge_edge_states(replace(state, memory={**state.memory, CLOUD: cloud}), [first_edge_state] * count)


@dataclass(frozen=True)
class RunAtEdges(Scheduled):
    """Runs a stage of a method at every edge for its own clients.

    An edge's share of the cohort is proportional to its number of clients, and is at least one client.
    """

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
        edge_clients = [(edge, client) for edge, plan in plans.items() for client in plan.tasks]
        if not edge_clients:
            return Plan()
        first = plans[edge_clients[0][0]]
        return Plan(
            first.program,
            {client: plans[edge].tasks[client] for edge, client in edge_clients},
            first.cache_models,
            edge_of_client={client: edge for edge, client in edge_clients},
            program_of_client={
                client: p for edge, client in edge_clients if (p := plans[edge].program) and p != first.program
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
        assigned = ClientTable.load(state, EDGES)
        return assigned.to_dict("edge")


def _record_sample_counts(state: ServerState, reports: Mapping[ClientId, Report]) -> ServerState:
    """Returns the state that remembers the numbers of training samples that clients reported last."""
    assigned, num_samples = (
        ClientTable.load(state, EDGES),
        {c: r.counts["train"] for c, r in reports.items() if "train" in r.counts},
    )
    if not num_samples:
        return state
    counts = [
        num_samples.get(c, last_count)
        for c, last_count in zip(assigned.clients, assigned["rows"].tolist(), strict=True)
    ]
    table = ClientTable(assigned.clients, {**assigned.columns, "rows": torch.tensor(counts)})
    return replace(state, memory={**state.memory, EDGES: table.to_tree()})


@dataclass(frozen=True)
class AverageEdgeModels(ServerOnly):
    """Averages the models of the edges every `every_rounds` rounds and after the last round.

    An edge is weighted by the reported number of samples of its clients. If edges have several models, equal names
    do not mean related models. The edge with the most models is then the reference, and each model of another edge
    counts as the reference model that it is closest to, weighted by its fraction of its edge's clients.
    """

    every_rounds: int
    rounds: int = 0  # number of rounds of the run, or 0 for a run without an end
    name: str = CLOUD
    purpose: ClassVar[StagePurpose] = "training"

    @property
    def schedule(self) -> Schedule:
        return Schedule("edges", periodic_rounds(self.rounds, self.every_rounds))

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        edges, assigned = edge_states(state), ClientTable.load(state, EDGES)
        if not len(assigned) or not int(assigned["rows"].sum()):
            return state
        samples_by_edge = np.bincount(assigned["edge"].numpy(), assigned["rows"].numpy(), len(edges)).astype(np.float64)
        reference = max(range(len(edges)), key=lambda k: (len(edges[k].models), samples_by_edge[k], -k))
        closest = [
            {name: _closest_model(model, edges[reference].models) for name, model in e.models.items()} for e in edges
        ]
        closest[reference] = {name: name for name in edges[reference].models}
        cloud = {name: self._mean(name, edges, closest, samples_by_edge) for name in edges[reference].models}
        sent = [{name: cloud[cloud_name] for name, cloud_name in closest[k].items()} for k in range(len(edges))]
        exchanges = {
            edge_name(k): EdgeExchange(Report(edge.models, counts={"train": int(samples_by_edge[k])}), Task(sent[k]))
            for k, edge in enumerate(edges)
        }
        after = merge_edge_states(state, [replace(edge, models=sent[k]) for k, edge in enumerate(edges)])
        remembered = {"models": cloud, "reference": torch.tensor(reference)}
        return replace(after, memory={**after.memory, CLOUD: remembered}, edge_exchanges=exchanges)

    def _mean(
        self,
        name: str,
        edges: Sequence[ServerState],
        closest: Sequence[Mapping[str, str]],
        samples_by_edge: NDArray[np.float64],
    ) -> Params:
        weighted_models = [
            (samples_by_edge[k] * fraction, edge.models[own])
            for k, edge in enumerate(edges)
            for own, fraction in _client_fraction_by_model(edge).items()
            if closest[k][own] == name and samples_by_edge[k] * fraction > 0
        ]
        if not weighted_models:  # no client has trained this model
            return next(
                edge.models[own] for k, edge in enumerate(edges) for own in closest[k] if closest[k][own] == name
            )
        return tree.weighted_mean([model for _, model in weighted_models], [weight for weight, _ in weighted_models])


def _closest_model(model: Params, candidates: Mapping[str, Params]) -> str:
    def squared_distance(other: Params) -> float:
        floats = [k for k, x in model.items() if x.is_floating_point()]
        return sum(float((model[k].double() - other[k].double()).square().sum()) for k in floats)

    return min(sorted(candidates), key=lambda name: squared_distance(candidates[name]))


def _client_fraction_by_model(edge: ServerState) -> dict[str, float]:
    """Returns the fraction of an edge's clients that belong to each model, equal for all models without clusters."""
    names = sorted(edge.models)
    if not edge.membership:
        return dict.fromkeys(names, 1 / len(names))
    sizes = torch.stack(list(edge.membership.values())).double().sum(0)
    return dict(zip(names, (sizes / sizes.sum()).tolist(), strict=True))
