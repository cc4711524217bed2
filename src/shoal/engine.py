"""The round loop: `run` runs and evaluates rounds, and `run_round` runs the stages of one round.

`run_round` executes the stages of a method, `evaluate` evaluates the clients, and `evaluate_unseen` evaluates clients
that were excluded from training. The types are in `shoal.types`, the ledger of bytes and joules in `shoal.cost.ledger`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal import metrics, model_cache, report_validation, tree
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
    CENTRALISED_CLIENT,
    UNLABELLED_SPLIT,
    ClientId,
    Fleet,
    Method,
    Params,
    Plan,
    Report,
    Samples,
    ServerState,
    Stage,
    Task,
    Tree,
)

log = logging.getLogger(__name__)

NUM_THREADS = torch.get_num_threads()  # the number that torch or the user chose, before a fleet reduces it


@dataclass(frozen=True)
class Evaluation:
    """The scores of clients on their own test samples, and of an inference-only client on the central test set."""

    clients: Mapping[ClientId, Score]
    central: Score | None
    # For each client, the number of test samples that each model predicted. Empty if models are not chosen by sample.
    samples_by_model: Mapping[ClientId, Mapping[str, int]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns accuracy and loss for JSON: over the clients ("local" and others) and on the central test set."""
        fleet_summary = metrics.summarise_clients(list(self.clients.values()))
        local_loss = fleet_summary.loss if fleet_summary else None
        return {
            "accuracy": {
                **{k: getattr(fleet_summary, k, None) for k in ("local", "std", "worst10", "f1")},
                "central": self.central.accuracy if self.central else None,
            },
            "loss": {"local": local_loss, "central": self.central.loss if self.central else None},
        }


@dataclass(frozen=True)
class RoundRecord:
    """The record of one finished round. It contains no clock times, so the same seed gives the same record."""

    round: int  # counts from 1
    cohort_size: int
    metrics: Mapping[str, float]  # "stage.metric" -> mean over all samples, or a number that the stage computed itself
    bytes_down: int
    bytes_up: int
    evaluation: Evaluation | None = None
    flops: int = 0  # of all clients
    joules: Mapping[str, float] = field(default_factory=dict)  # of all clients: preparation, training, communication
    sim_time_s: float = 0.0  # modelled duration of the round on the clients' devices and links
    late_clients: tuple[ClientId, ...] = ()  # one entry for each report that arrived after the deadline
    depleted_clients: tuple[ClientId, ...] = ()  # clients whose battery became empty in this round
    bytes_edge_cloud: int | None = None  # both directions; None if there are no edge servers
    rejected: Mapping[ClientId, str] = field(default_factory=dict)  # client -> why its report was not used

    @property
    def num_late_reports(self) -> int:
        """The number of reports that arrived after the deadline."""
        return len(self.late_clients)

    def to_json(self) -> dict[str, Any]:
        """Returns the line of rounds.jsonl for this round."""
        evaluation_summary = self.evaluation.summary() if self.evaluation else {"accuracy": None, "loss": None}
        return {
            "round": self.round,
            "cohort_size": self.cohort_size,
            "train_loss": self.metrics.get("train.loss"),
            "metrics": dict(self.metrics),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "flops": self.flops,
            "joules": dict(self.joules),
            "sim_time_s": self.sim_time_s,
            "num_late_reports": self.num_late_reports,
            "late_clients": list(self.late_clients),
            "depleted_clients": list(self.depleted_clients),
            **({"rejected_reports": dict(self.rejected)} if self.rejected else {}),
            **({} if self.bytes_edge_cloud is None else {"bytes_edge_cloud": self.bytes_edge_cloud}),
            **evaluation_summary,
        }


@dataclass(frozen=True)
class RoundTiming:
    """Measured times of a round on this machine. They differ between runs with the same seed."""

    wall_s: float
    server_s: float  # processor time for planning and folding, which is the work of a real server


class Store(Protocol):
    """Stores a run. `append` is called before `checkpoint`, because a surplus line is easy to drop after a crash."""

    def append(self, record: RoundRecord, entries: Sequence[LedgerEntry], timing: RoundTiming) -> None:
        """Appends the record of a round."""

    def checkpoint(self, state: ServerState) -> None:
        """Stores the state after a round."""


@dataclass(frozen=True)
class Result:
    """The result of a run: the last state, the record of every round, and the ledger of bytes and joules."""

    state: ServerState
    rounds: Sequence[RoundRecord]
    ledger: Ledger
    wall_s: float
    server_s: float
    stop_reason: str | None = None  # None if the run reached its last round

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation after the last round."""
        last = self.rounds[-1].evaluation
        assert last is not None, "the last round is always evaluated"
        return last

    @property
    def accuracy(self) -> dict[str, float]:
        """Accuracy after the last round: local, std, worst10, f1 and central."""
        accuracy: dict[str, float] = self.evaluation.summary()["accuracy"]
        return accuracy

    @property
    def edges(self) -> dict[str, list[ClientId]]:
        """The clients of each edge server. It is empty if there are no edge servers."""
        clients_by_edge: dict[str, list[ClientId]] = {}
        for client, edge in ClientTable.load(self.state, "edges").to_dict("edge").items():
            clients_by_edge.setdefault(f"edge-{edge:03d}", []).append(client)
        return dict(sorted(clients_by_edge.items()))

    @property
    def clusters(self) -> dict[ClientId, list[str]]:
        """The names of the experts of each client's clusters. It is empty if there are no clusters.

        A client is in the cluster with its largest weight, and in every cluster with a weight above 0.5.
        """
        names = sorted(self.state.models)
        models_by_client = {}
        for client, weights in sorted(self.state.membership.items()):
            largest = int(weights.argmax())
            models_by_client[client] = [n for k, n in enumerate(names) if k == largest or float(weights[k]) > 0.5]
        return models_by_client


class CentralTestEvaluator:
    """Evaluates models on the central test set, like a client that never trains and has no private state."""

    def __init__(self, samples: Samples) -> None:
        self.fleet = PlainFleet({"central": {"test": samples}})
        # Compiling steps saves no time here, because evaluation runs only a few large batches.
        self.fleet.recorder = Recorder(record_after_calls=NEVER)

    def score(self, program: Evaluate, models: Mapping[str, Params]) -> Score:
        """Returns the score of the models."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(NUM_THREADS)  # all threads, because no other part of this run works at the same time
        try:
            return _score(self.fleet.execute_one(program, "central", Task(models)))
        finally:
            torch.set_num_threads(num_threads)


def evaluate(
    method: Method,
    fleet: Fleet,
    state: ServerState,
    central_evaluator: CentralTestEvaluator | None,
    timer: Timer | None = None,
) -> Evaluation:
    """Evaluates the clients on their test samples, with `models_for` and `predict` of the method.

    Nothing else reads the test split.

    Parameters
    ----------
    method
        The method that serves the clients.
    fleet
        The clients.
    state
        The state of the server.
    central_evaluator
        Evaluates an inference-only client on the central test set. None if there is no such set.
    timer
        Measures the time of the evaluation.
    """
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
    """Evaluates unseen clients, which are excluded from training, on all of their samples.

    Parameters
    ----------
    method
        The method that serves the clients.
    state
        The state of the server after training.
    unseen
        The labelled samples of each unseen client.
    infer_from_inputs
        Whether the method may use the inputs of a client, without labels, to choose its models and to adapt to it.
        Otherwise every client is served the models of an inference-only client.
    num_inputs
        The number of inputs that the method may use, drawn at random. None for all inputs.
    seed
        The seed for drawing the inputs.
    """
    unseen = {c: samples for c, samples in unseen.items() if len(samples.y)}
    fleet = PlainFleet({c: {"test": samples} for c, samples in unseen.items()})
    default_models, models_for_inputs = method.models_for(state, None), method.models_for_inputs
    unlabelled_by_client = (
        {c: without_labels(samples, c, num_inputs, seed) for c, samples in unseen.items()} if infer_from_inputs else {}
    )
    tasks = {}
    for client in unseen:
        models = default_models
        if infer_from_inputs and models_for_inputs is not None:
            models = models_for_inputs(state, unlabelled_by_client[client].x)
        tasks[client] = Task(models)
    if infer_from_inputs and method.adaptation_program is not None:
        unlabelled_fleet = PlainFleet(
            {c: {UNLABELLED_SPLIT: x} for c, x in unlabelled_by_client.items()}, fleet.private
        )
        unlabelled_fleet.execute(Plan(method.adaptation_program, tasks))
    reports = fleet.execute(Plan(Evaluate.for_method(method), tasks))
    samples_by_model = {
        c: _samples_by_model(method, tasks[c].models, fleet.private.get(c, {}), samples.x)
        for c, samples in unseen.items()
    }
    return Evaluation(
        {c: _score(r) for c, r in reports.items()},
        None,
        {c: counts for c, counts in samples_by_model.items() if counts},
    )


def _samples_by_model(method: Method, models: Mapping[str, Params], private: Tree, x: Tensor) -> dict[str, int]:
    """Returns the number of samples that each model predicted, if the method chooses a model for each sample."""
    if method.predict_routed is None:
        return {}
    names, counts = sorted(models), dict[str, int]()
    with torch.no_grad():
        for batch in torch.split(x, 1024):
            model_index = method.predict_routed(models, private, batch).model_index
            for k, num_samples in enumerate(model_index.bincount().tolist()):
                if num_samples:
                    counts[names[k]] = counts.get(names[k], 0) + num_samples
    return dict(sorted(counts.items()))


def without_labels(samples: Samples, client: ClientId, num_inputs: int | None, seed: int) -> Samples:
    """Returns `num_inputs` random samples of a client, or all of them (None), with zeros instead of labels."""
    random = generator(derive_seed(seed, "inputs", client))
    order = torch.randperm(len(samples.y), generator=random)[:num_inputs].to(samples.y.device)
    x = samples.x[order.sort().values]
    return Samples(x, torch.zeros(len(x), dtype=samples.y.dtype, device=samples.y.device))


def _score(report: Report) -> Score:
    hits, num_samples = report.metrics["accuracy"]
    f1 = metrics.macro_f1(*report.tensors["classes"]["counts"])
    assert f1 is not None, "a split with samples has classes"
    return Score(hits / num_samples, report.metrics["loss"][0] / num_samples, f1, int(num_samples))


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
    """Runs a method from the round of the state to the last round.

    Parameters
    ----------
    method
        The method.
    fleet
        The clients.
    rounds
        The number of rounds, including those before `state`.
    seed
        The seed of the run.
    central_samples
        The central test set. None if there is none.
    eval_every
        Evaluate once in this many rounds, and after the last round.
    state
        The state to continue from. None for the first round.
    earlier_rounds
        The records of the rounds before `state`.
    ledger
        The ledger of the rounds before `state`, or an empty one with the cost model to use.
    store
        Stores every round. None if the run is kept in memory only.
    on_round
        A function that is called with the record of every round.
    timer
        Measures the times of the parts of the run.

    Returns
    -------
    Result
        The last state, the records of all rounds, and the ledger.

    Raises
    ------
    UserError
        If a model is no longer finite.
    """
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
        # Warn once, not in every empty round, so that the log stays readable.
        if not record.cohort_size and (not history or history[-1].cohort_size):
            log.warning("Round %d has no participants: no client could be selected.", record.round)
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
    """Returns the reason why the run ends early, or None if it goes on.

    Only modelled joules decide, so that the same run always ends after the same round.
    """
    if ledger.costs.budget_joules is not None and ledger.total_joules >= ledger.costs.budget_joules:
        return f"the clients' budget of {ledger.costs.budget_joules:g} J is spent"
    if ledger.costs.battery_joules is not None and not _clients_with_energy(ledger, fleet):
        return "every battery is empty"
    return None


def _clients_with_energy(ledger: Ledger, fleet: Fleet) -> tuple[ClientId, ...]:
    """Returns the present clients whose battery is not empty."""
    limit = ledger.costs.battery_joules
    if limit is None:
        return fleet.roster()
    return tuple(c for c in fleet.roster() if ledger.spent_joules.get(c, 0.0) < limit)


def run_round(
    method: Method, fleet: Fleet, state: ServerState, seed: int, ledger: Ledger, timer: Timer
) -> tuple[ServerState, RoundRecord, float]:
    """Runs the stages of one round.

    Returns
    -------
    tuple
        The next state, the record of the round without an evaluation, and the server's processor time in seconds.
    """
    round_number, server_s = state.round + 1, 0.0
    late_clients: list[ClientId] = []
    rejected: dict[ClientId, str] = {}
    roster, size = _clients_with_energy(ledger, fleet), method.cohort_size
    state = replace(state, roster=roster, devices=ledger.costs.profiles, cohort_size=size, cohort=(), round_metrics={})
    round_metrics: dict[str, float] = {}
    for stage in method.stages:
        if not stage.due(state.round):
            continue
        stage_seed = derive_seed(seed, state.round, stage.name)
        with timer(f"{stage.name}: server") as planning:
            plan = replace(stage.plan(state, stage_seed), round=round_number, stage=stage.name)
            plan = model_cache.mark_cached_models(plan, state)
        reports: Mapping[ClientId, Report] = {}
        if plan.tasks:
            with timer(f"{stage.name}: clients"):
                reports = {c: report for part in plan.by_program() for c, report in fleet.execute(part).items()}
            with timer("ledger"):
                too_late = ledger.record_stage(round_number, stage.name, stage.purpose, plan, reports)
                reports = {c: r for c, r in reports.items() if c not in too_late} if too_late else reports
            late_clients += [c for c in plan.tasks if c in too_late]
            with timer(f"{stage.name}: server") as validation:
                reports = _accepted_reports(stage, plan, reports, state.roster, rejected)
                round_metrics |= _mean_metrics(stage.name, reports)
            server_s += validation.cpu_s
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
        rejected=rejected,
    )
    state = replace(state, round=round_number, roster=(), devices={}, cohort_size=0, cohort=(), round_metrics={})
    return state, record, round(server_s, 6)


def _accepted_reports(
    stage: Stage,
    plan: Plan,
    reports: Mapping[ClientId, Report],
    roster: Sequence[ClientId],
    rejected: dict[ClientId, str],
) -> Mapping[ClientId, Report]:
    """Returns the reports that the stage may read, and adds the reasons for all others to `rejected`.

    A client whose report is rejected counts as one that did not respond.
    """
    reasons = report_validation.rejection_reasons(plan, reports)
    if not reasons:
        return reports
    if len(reasons) == len(reports):
        _refuse_divergence_of_all(stage, plan, reports, roster)
    for client, reason in reasons.items():
        log.warning(
            "Round %d: the report of client %s in stage %r is rejected: %s.", plan.round, client, stage.name, reason
        )
        rejected[client] = f"{rejected[client]}; {reason}" if client in rejected else reason
    return {c: r for c, r in reports.items() if c not in reasons}


def _refuse_divergence_of_all(
    stage: Stage, plan: Plan, reports: Mapping[ClientId, Report], roster: Sequence[ClientId]
) -> None:
    """Raises UserError if training diverged on all clients of a stage, because then settings are to blame.

    A single client of several does not end the run, although it may be the only one that trained.
    """
    is_single_of_several = len(reports) == 1 and len(roster) > 1 and CENTRALISED_CLIENT not in reports
    if stage.purpose != "training" or is_single_of_several:
        return
    if not any(report_validation.has_only_finite_values(report) for report in reports.values()):
        raise UserError(
            f"training diverged: the reports of all clients in stage {stage.name!r} of round {plan.round} have values "
            "that are not finite; a smaller --lr, or --set train.clip=1, may help"
        )


def _depleted_clients(ledger: Ledger, roster: Sequence[ClientId]) -> tuple[ClientId, ...]:
    """Returns the clients of the roster whose battery is empty."""
    limit = ledger.costs.battery_joules
    return () if limit is None else tuple(c for c in roster if ledger.spent_joules.get(c, 0.0) >= limit)


def _round_costs(round_number: int, ledger: Ledger) -> RoundRecord:
    """Returns a record with the costs of the round and nothing else."""
    entries = ledger.of_round(round_number)
    client_entries = [e for e in entries if e.link != EDGE_CLOUD]
    cloud_entries = [e for e in entries if e.link == EDGE_CLOUD]
    has_edges = bool(cloud_entries) or any(e.edge for e in client_entries)
    bytes_edge_cloud = sum(int(e.bytes_down.sum() + e.bytes_up.sum()) for e in cloud_entries)
    return RoundRecord(
        round_number,
        cohort_size=0,
        metrics={},
        bytes_down=sum(int(e.bytes_down.sum()) for e in client_entries),
        bytes_up=sum(int(e.bytes_up.sum()) for e in client_entries),
        flops=sum(int(e.flops.sum()) for e in entries),
        joules=total_joules_by_part(entries),
        sim_time_s=ledger.round_duration_s.get(round_number, 0.0),
        bytes_edge_cloud=bytes_edge_cloud if has_edges else None,
    )


def _mean_metrics(stage: str, reports: Mapping[ClientId, Report]) -> dict[str, float]:
    """Returns the mean of every reported metric over all samples, as "stage.metric"."""
    names = sorted({name for r in reports.values() for name in r.metrics})
    means = {f"{stage}.{n}": metrics.mean_over_clients((r.metrics for r in reports.values()), n) for n in names}
    return {k: v for k, v in means.items() if v is not None}


def _refuse_divergence(state: ServerState, stage: str) -> None:
    """Raises UserError if a model is not finite, because such a model never recovers."""
    for name, model in state.models.items():
        if not all(bool(torch.isfinite(x).all()) for x in tree.leaves(model) if x.is_floating_point()):
            raise UserError(
                f"training diverged: model {name!r} is no longer finite after stage {stage!r} of round "
                f"{state.round + 1}; a smaller --lr, or --set train.clip=1, may help"
            )
