"""The only round loop. Everything that happens in a run happens in `run`, in this order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal import metrics, model_cache, tree
from shoal.client.evaluate import Evaluate
from shoal.client_table import ClientTable
from shoal.cost.ledger import EDGE_CLOUD, Ledger, LedgerEntry, total_joules_by_part
from shoal.cost.timer import Timer
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.tracing import NEVER, Recorder
from shoal.metrics import Score
from shoal.rng import derive_seed, generator
from shoal.types import (
    UNLABELLED_SPLIT,
    ClientId,
    Fleet,
    Method,
    Params,
    Plan,
    Report,
    Samples,
    ServerState,
    Task,
    Tree,
)

log = logging.getLogger(__name__)

NUM_THREADS = torch.get_num_threads()  # as torch or its user chose, before any fleet takes some away


@dataclass(frozen=True)
class Evaluation:
    """Clients on their own test data, and an inference-only client on the central test set."""

    clients: Mapping[ClientId, Score]
    central: Score | None
    samples_by_model: Mapping[ClientId, Mapping[str, int]] = field(
        default_factory=dict
    )  # rows by model, if one is chosen

    def summary(self) -> dict[str, Any]:
        fleet_summary = metrics.summarise_clients(list(self.clients.values()))
        mean_loss = fleet_summary.loss if fleet_summary else None
        return {
            "accuracy": {
                **{k: getattr(fleet_summary, k, None) for k in ("mean", "std", "worst10", "f1")},
                "central": self.central.accuracy if self.central else None,
            },
            "loss": {"mean": mean_loss, "central": self.central.loss if self.central else None},
        }


@dataclass(frozen=True)
class RoundRecord:
    """What is known of one finished round. The same seed gives the same record: no clock in it."""

    round: int  # counts from 1
    cohort_size: int
    metrics: Mapping[str, float]  # "stage.metric" -> mean over all examples, or what the stage counted itself
    bytes_down: int
    bytes_up: int
    evaluation: Evaluation | None = None
    flops: int = 0  # of all clients
    joules: Mapping[str, float] = field(default_factory=dict)  # of all clients: pre, train, comm
    sim_time_s: float = 0.0  # how long the round would take on the clients' devices and links
    late_clients: tuple[ClientId, ...] = ()  # one for each report that came after the deadline
    depleted_clients: tuple[ClientId, ...] = ()  # whose batteries this round emptied
    bytes_edge_cloud: int | None = None  # between edges and the cloud, both ways, where there are edges

    @property
    def num_late_reports(self) -> int:
        return len(self.late_clients)

    def to_json(self) -> dict[str, Any]:
        figures = self.evaluation.summary() if self.evaluation else {"accuracy": None, "loss": None}
        return {
            "round": self.round,
            "cohort": self.cohort_size,
            "train_loss": self.metrics.get("train.loss"),
            "metrics": dict(self.metrics),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "flops": self.flops,
            "joules": dict(self.joules),
            "sim_time_s": self.sim_time_s,
            "late": self.num_late_reports,
            "late_clients": list(self.late_clients),
            "left": list(self.depleted_clients),
            **({} if self.bytes_edge_cloud is None else {"bytes_long": self.bytes_edge_cloud}),
            **figures,
        }


@dataclass(frozen=True)
class RoundTiming:
    """What a round took here, by the clock, and what the server worked of it: never the same twice."""

    wall_s: float
    server_s: float  # planning and folding: the work of a real server


class Store(Protocol):
    """Where a run is kept. `append` comes before `checkpoint`: a line too many is easily dropped."""

    def append(self, record: RoundRecord, entries: Sequence[LedgerEntry], timing: RoundTiming) -> None: ...

    def checkpoint(self, state: ServerState) -> None: ...


@dataclass(frozen=True)
class Result:
    state: ServerState
    rounds: Sequence[RoundRecord]
    ledger: Ledger
    wall_s: float
    server_s: float
    stop_reason: str | None = None  # why, if before the last round

    @property
    def evaluation(self) -> Evaluation:
        last = self.rounds[-1].evaluation
        assert last is not None, "the last round is always evaluated"
        return last

    @property
    def accuracy(self) -> dict[str, float]:
        figures: dict[str, float] = self.evaluation.summary()["accuracy"]
        return figures

    @property
    def edges(self) -> dict[str, list[ClientId]]:
        """The clients of each edge; empty without edges."""
        table, clients_by_edge = ClientTable.load(self.state, "edges"), dict[str, list[ClientId]]()
        for client, edge in zip(table.clients, table.columns.get("edge", torch.empty(0)).tolist(), strict=True):
            clients_by_edge.setdefault(f"edge-{edge:03d}", []).append(client)
        return dict(sorted(clients_by_edge.items()))

    @property
    def clusters(self) -> dict[ClientId, list[str]]:
        """The models of the groups that each client is in by more than half, or else most; empty without groups."""
        names = sorted(self.state.models)
        found = {}
        for client, weights in sorted(self.state.membership.items()):
            most = int(weights.argmax())
            found[client] = [n for k, n in enumerate(names) if k == most or float(weights[k]) > 0.5]
        return found


class CentralTestEvaluator:
    """Who never trains and has nothing private: it holds the central test set."""

    def __init__(self, samples: Samples) -> None:
        self.fleet = PlainFleet({"unseen": {"test": samples}})
        self.fleet.recorder = Recorder(record_after_calls=NEVER)  # a few large batches: nothing to gain

    def score(self, program: Evaluate, models: Mapping[str, Params]) -> Score:
        before = torch.get_num_threads()
        torch.set_num_threads(NUM_THREADS)  # all of them: whoever else works for this run waits for us now
        try:
            return _score(self.fleet.execute_one(program, "unseen", Task(models)))
        finally:
            torch.set_num_threads(before)


def evaluate(
    method: Method,
    fleet: Fleet,
    state: ServerState,
    central_evaluator: CentralTestEvaluator | None,
    timer: Timer | None = None,
) -> Evaluation:
    """Of exactly what is served: `models_for` and `predict`, on the test split that nothing else opens."""
    program, timer = Evaluate.for_method(method), timer or Timer()
    with timer("evaluate: clients"):
        tasks = {c: Task(method.models_for(state, c)) for c in fleet.roster()}
        reports = fleet.execute(Plan(program, tasks)) if tasks else {}
        scores = {c: _score(r) for c, r in reports.items() if r.metrics["accuracy"][1]}
    with timer("evaluate: central"):
        central = (
            None if central_evaluator is None else central_evaluator.score(program, method.models_for(state, None))
        )
    return Evaluation(scores, central)


def evaluate_unseen(
    method: Method,
    state: ServerState,
    unseen: Mapping[ClientId, Samples],
    infer_from_inputs: bool = False,
    num_inputs: int | None = None,
    seed: int = 0,
) -> Evaluation:
    """Clients that never trained, each on all of its rows: with what anybody is served, or with `assign` by what the
    method makes of its rows without labels; of so many `inputs`, drawn by chance, or of all."""
    unseen = {c: rows for c, rows in unseen.items() if len(rows.y)}
    unlabelled_by_client = (
        {c: without_labels(rows, c, num_inputs, seed) for c, rows in unseen.items()} if infer_from_inputs else {}
    )
    fleet, default_models = (
        PlainFleet({c: {"test": rows} for c, rows in unseen.items()}),
        method.models_for(state, None),
    )
    models_for_inputs = method.models_for_inputs
    tasks = {
        c: Task(
            default_models
            if models_for_inputs is None or not infer_from_inputs
            else models_for_inputs(state, unlabelled_by_client[c].x)
        )
        for c in unseen
    }
    if infer_from_inputs and method.adaptation_program is not None:
        PlainFleet({c: {UNLABELLED_SPLIT: rows} for c, rows in unlabelled_by_client.items()}, fleet.private).execute(
            Plan(method.adaptation_program, tasks)
        )
    reports = fleet.execute(Plan(Evaluate.for_method(method), tasks))
    samples_by_model = {
        c: _samples_by_model(method, tasks[c].models, fleet.private.get(c, {}), rows.x) for c, rows in unseen.items()
    }
    return Evaluation(
        {c: _score(r) for c, r in reports.items()},
        None,
        {c: counts for c, counts in samples_by_model.items() if counts},
    )


def _samples_by_model(method: Method, models: Mapping[str, Params], private: Tree, x: Tensor) -> dict[str, int]:
    """How many rows each model answered, where the method chooses one for each."""
    if method.predict_routed is None:
        return {}
    names, counts = sorted(models), dict[str, int]()
    with torch.no_grad():
        for part in torch.split(x, 1024):
            for k, rows in enumerate(method.predict_routed(models, private, part).model_index.bincount().tolist()):
                if rows:
                    counts[names[k]] = counts.get(names[k], 0) + rows
    return dict(sorted(counts.items()))


def without_labels(samples: Samples, client: ClientId, num_inputs: int | None, seed: int) -> Samples:
    """So many of a client's rows, or all: what stands in the place of labels says nothing."""
    drawn = generator(derive_seed(seed, "inputs", client))
    order = torch.randperm(len(samples.y), generator=drawn)[:num_inputs].to(samples.y.device)
    x = samples.x[order.sort().values]
    return Samples(x, torch.zeros(len(x), dtype=samples.y.dtype, device=samples.y.device))


def _score(report: Report) -> Score:
    hits, rows = report.metrics["accuracy"]
    f1 = metrics.macro_f1(*report.tensors["classes"]["counts"])
    assert f1 is not None, "a split with rows has classes"
    return Score(hits / rows, report.metrics["loss"][0] / rows, f1, int(rows))


def run(
    method: Method,
    fleet: Fleet,
    *,
    rounds: int,
    seed: int,
    central_samples: Samples | None = None,
    eval_every: int = 1,
    state: ServerState | None = None,
    earlier_rounds: Sequence[RoundRecord] = (),
    ledger: Ledger | None = None,
    store: Store | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    timer: Timer | None = None,
) -> Result:
    """Rounds from `state.round` up to `rounds`; `records` and `ledger` are those of the rounds before."""
    run_start_s, server_s = time.perf_counter(), 0.0
    state = method.init(seed) if state is None else state
    ledger, history, timer = ledger or Ledger(), list(earlier_rounds), timer or Timer()
    central_evaluator = (
        CentralTestEvaluator(central_samples) if central_samples is not None and len(central_samples.y) else None
    )
    stop_reason = _stop_reason(ledger, fleet)
    while state.round < rounds and not stop_reason:
        round_start_s = time.perf_counter()
        state, record, round_server_s = run_round(method, fleet, state, seed, ledger, timer)
        stop_reason = _stop_reason(ledger, fleet)
        if stop_reason or state.round == rounds or state.round % eval_every == 0:
            record = replace(record, evaluation=evaluate(method, fleet, state, central_evaluator, timer))
        if not record.cohort_size and (not history or history[-1].cohort_size):  # told once for as long as it lasts
            log.warning("nobody takes part in round %d: no client was chosen, or none answered in time", record.round)
        history.append(record)
        server_s += round_server_s
        if store is not None:
            with timer("checkpoint"):
                store.append(
                    record,
                    ledger.of_round(record.round),
                    RoundTiming(time.perf_counter() - round_start_s, round_server_s),
                )
                store.checkpoint(state)
        if on_round is not None:
            on_round(record)
    return Result(state, history, ledger, time.perf_counter() - run_start_s, server_s, stop_reason)


def _stop_reason(ledger: Ledger, fleet: Fleet) -> str | None:
    """Why there is no next round. Only modelled joules decide, so that the same run ends at the same round."""
    if ledger.costs.budget_joules is not None and ledger.total_joules >= ledger.costs.budget_joules:
        return f"the clients' budget of {ledger.costs.budget_joules:g} J is spent"
    if ledger.costs.battery_joules is not None and not _charged_clients(ledger, fleet):
        return "every battery is empty"
    return None


def _charged_clients(ledger: Ledger, fleet: Fleet) -> tuple[ClientId, ...]:
    """The clients that are there and have something left in their batteries."""
    limit = ledger.costs.battery_joules
    if limit is None:
        return fleet.roster()
    return tuple(c for c in fleet.roster() if ledger.spent_joules.get(c, 0.0) < limit)


def run_round(
    method: Method, fleet: Fleet, state: ServerState, seed: int, ledger: Ledger, timer: Timer
) -> tuple[ServerState, RoundRecord, float]:
    """The next state, what is known of the round, and the processor seconds that the server worked for it."""
    round_number, server_s = state.round + 1, 0.0
    late_clients: list[ClientId] = []
    roster, size = _charged_clients(ledger, fleet), method.cohort_size
    state = replace(state, roster=roster, devices=ledger.costs.profiles, cohort_size=size, cohort=(), round_metrics={})
    round_metrics: dict[str, float] = {}
    for stage in method.stages:
        if not stage.due(state.round):
            continue
        stage_seed = derive_seed(seed, state.round, stage.name)
        with timer(f"{stage.name}: server") as planning:
            plan = model_cache.mark_cached_models(stage.plan(state, stage_seed), state)
        reports: Mapping[ClientId, Report] = {}
        if plan.tasks:
            with timer(f"{stage.name}: clients"):
                reports = {c: report for part in plan.by_program() for c, report in fleet.execute(part).items()}
            with timer("ledger"):
                too_late = ledger.record_stage(round_number, stage.name, stage.purpose, plan, reports)
                reports = {c: r for c, r in reports.items() if c not in too_late} if too_late else reports
                round_metrics |= _mean_metrics(stage.name, reports)
            late_clients += [c for c in plan.tasks if c in too_late]
        with timer(f"{stage.name}: server") as folding:
            state = model_cache.remember_sent_models(stage.fold(state, reports, stage_seed), plan, reports)
        if state.edge_exchanges:
            ledger.record_edge_exchanges(round_number, stage.name, stage.purpose, state.edge_exchanges)
            state = replace(state, edge_exchanges={})
        server_s += planning.cpu_s + folding.cpu_s
        _refuse_divergence(state, stage.name)
    record = replace(
        _round_costs(round_number, ledger),
        cohort_size=len(state.cohort),
        metrics=round_metrics | dict(state.round_metrics),
        late_clients=tuple(late_clients),
        depleted_clients=_depleted_clients(ledger, state.roster),
    )
    state = replace(state, round=round_number, roster=(), devices={}, cohort_size=0, cohort=(), round_metrics={})
    return state, record, round(server_s, 6)


def _depleted_clients(ledger: Ledger, roster: Sequence[ClientId]) -> tuple[ClientId, ...]:
    limit = ledger.costs.battery_joules
    return () if limit is None else tuple(c for c in roster if ledger.spent_joules.get(c, 0.0) >= limit)


def _round_costs(round_number: int, ledger: Ledger) -> RoundRecord:
    pages = ledger.of_round(round_number)
    client_entries, cloud_entries = (
        [p for p in pages if p.link != EDGE_CLOUD],
        [p for p in pages if p.link == EDGE_CLOUD],
    )
    edges = any(p.edge for p in client_entries)
    return RoundRecord(
        round_number,
        cohort_size=0,
        metrics={},
        bytes_down=sum(int(p.bytes_down.sum()) for p in client_entries),
        bytes_up=sum(int(p.bytes_up.sum()) for p in client_entries),
        flops=sum(int(p.flops.sum()) for p in pages),
        joules=total_joules_by_part(pages),
        sim_time_s=ledger.round_duration_s.get(round_number, 0.0),
        bytes_edge_cloud=sum(int(p.bytes_down.sum() + p.bytes_up.sum()) for p in cloud_entries)
        if edges or cloud_entries
        else None,
    )


def _mean_metrics(stage: str, reports: Mapping[ClientId, Report]) -> dict[str, float]:
    names = sorted({name for r in reports.values() for name in r.metrics})
    means = {f"{stage}.{n}": metrics.mean_over_clients((r.metrics for r in reports.values()), n) for n in names}
    return {k: v for k, v in means.items() if v is not None}


def _refuse_divergence(state: ServerState, stage: str) -> None:
    """A model of NaNs never recovers: better to stop at the last good checkpoint than to train on."""
    for name, model in state.models.items():
        if not all(bool(torch.isfinite(x).all()) for x in tree.leaves(model) if x.is_floating_point()):
            raise UserError(
                f"training diverged: model {name!r} is no longer finite after stage {stage!r} of round "
                f"{state.round + 1}; a smaller --lr, or --set train.clip=1, may help"
            )
