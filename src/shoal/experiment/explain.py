"""Explains a method step by step: what clients and the server send and learn, when, and what a round costs.

The texts come from the pieces, and the rounds from the schedules of the stages. Bytes and joules come from rounds that
are run on the data of the job: the first three rounds, and rounds of every other kind that a schedule has later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal import engine
from shoal.cost.ledger import Ledger, LedgerEntry
from shoal.cost.timer import Timer
from shoal.experiment.assemble import Experiment, fleet_session, make_fleet
from shoal.methods.composition.piece import piece_class
from shoal.types import Method, Recipients, Schedule, Stage, StepSummary

NUM_FIRST_ROUNDS = 3
FIRST_ROUND, USUAL_LATER_ROUND = "in round 1", "in a usual later round"


@dataclass(frozen=True)
class RoundKind:
    """Rounds in which a stage has the same recipients. `run_rounds` are the indices of rounds to run for costs."""

    recipients: Recipients
    run_rounds: tuple[int, ...]


def round_kinds(schedule: Schedule, rounds: int) -> dict[str, RoundKind]:
    """Returns the kinds of rounds of a schedule, by their names.

    A usual later round is one in which the schedule has no additional recipients. The first round of a kind is
    separate, as round 1 is, because clients may cache the models that they receive in it.
    """
    later: dict[Recipients, list[int]] = {}
    for round_index in range(1, rounds):
        later.setdefault(schedule.clients_in(round_index), []).append(round_index)
    first = schedule.clients_in(0)
    kinds = {FIRST_ROUND: RoundKind(first, (0,))}
    usual = next((r for r in (schedule.clients_otherwise, "none", schedule.clients) if r in later), None)
    if usual is not None:
        early = tuple(round_index for round_index in later[usual] if round_index < NUM_FIRST_ROUNDS)
        kinds[USUAL_LATER_ROUND] = RoundKind(usual, early or (later[usual][0],))
    for recipients, round_indices in later.items():
        if recipients in (usual, "none"):
            continue
        parts = (round_indices,) if recipients == first else (round_indices[:1], round_indices[1:])
        for part in filter(None, parts):
            words = "in round" if len(part) == 1 else "in a round such as"
            kinds[f"{words} {part[0] + 1}"] = RoundKind(recipients, (part[0],))
    return kinds


def rounds_to_run(experiment: Experiment) -> list[int]:
    """Returns the indices of the rounds to run: the first ones, and one of every other kind."""
    rounds = experiment.job.rounds
    kinds = [kind for stage in experiment.method.stages for kind in round_kinds(stage.schedule, rounds).values()]
    return sorted(
        {*range(min(NUM_FIRST_ROUNDS, rounds)), *(round_index for kind in kinds for round_index in kind.run_rounds)}
    )


def explain_method(
    experiment: Experiment, on_round: Callable[[engine.RoundRecord], None] | None = None
) -> dict[str, Any]:
    """Returns what `shoal explain --json` prints about a method."""
    method, entries = experiment.method, _run_rounds(experiment, on_round)
    stages = {stage.name: _stage_facts(stage, entries, experiment.job.rounds) for stage in method.stages}
    return {
        "method": method.name,
        "num_clients": len(experiment.federation),
        "num_parameters": experiment.model.num_parameters,
        "rounds": experiment.job.rounds,
        "steps": [_step_facts(step, method, stages) for step in steps_of(method)],
        "notes": list(method.notes),
    }


def _run_rounds(experiment: Experiment, on_round: Callable[[engine.RoundRecord], None] | None) -> Sequence[LedgerEntry]:
    """Runs the rounds and returns their ledger.

    Rounds in between are left out, because the messages depend on the round and hardly on earlier training.
    """
    ledger = Ledger(replace(experiment.costs, battery_joules=None, budget_joules=None))
    fleet, state = make_fleet(experiment), experiment.method.init(experiment.job.seed)
    with fleet_session(experiment, fleet):
        for count, round_index in enumerate(rounds_to_run(experiment), start=1):
            state = replace(state, round=round_index)
            state, record, _ = engine.run_round(experiment.method, fleet, state, experiment.job.seed, ledger, Timer())
            if on_round is not None:
                on_round(replace(record, round=count))  # the progress bar counts the rounds that are run
    return ledger.entries


def steps_of(method: Method) -> Sequence[StepSummary]:
    """Returns the steps of a method. Stages that belong to no piece, such as those of edge servers, come first."""
    covered_stages = {name for step in method.steps for name in step.stages}
    return [*(StepSummary("", s.name, (s.name,)) for s in method.stages if s.name not in covered_stages), *method.steps]


def _stage_facts(stage: Stage, entries: Sequence[LedgerEntry], rounds: int) -> dict[str, Any]:
    kinds, own = round_kinds(stage.schedule, rounds), [p for p in entries if p.stage == stage.name]
    costs = {words: _mean_costs(kind, own) for words, kind in kinds.items()}
    return {"stage": stage.name, "schedule": stage.schedule.to_json(), "costs": costs}


def _mean_costs(kind: RoundKind, entries: Sequence[LedgerEntry]) -> dict[str, Any]:
    """Returns the mean costs of one round of a kind, summed over the clients."""
    run_entries = [p for p in entries if p.round - 1 in kind.run_rounds]
    count = len(kind.run_rounds)
    return {
        "recipients": kind.recipients,
        "rounds": [round_index + 1 for round_index in kind.run_rounds],
        "num_clients": sum(len(p.clients) for p in run_entries) / count,
        "bytes_down": sum(float(p.bytes_down.sum()) for p in run_entries) / count,
        "bytes_up": sum(float(p.bytes_up.sum()) for p in run_entries) / count,
        "joules": sum(float(p.joules.sum()) for p in run_entries) / count,
    }


def _step_facts(step: StepSummary, method: Method, stages: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    facts = {"step": step.step, "piece": step.piece}
    if step.step:
        piece = piece_class(step.step, step.piece)
        facts |= {
            "source": piece.source,
            "client_sends": piece.client_sends,
            "client_keeps": piece.client_keeps,
            "server_learns": piece.server_learns,
            "remark": piece.remark,
        }
    else:
        stage = next(s for s in method.stages if s.name == step.piece)
        edge_stage = getattr(stage, "stage", stage)  # of a stage that runs at every edge server
        facts["summary"] = (type(edge_stage).__doc__ or "").split("\n\n")[0].replace("\n   ", "").strip()
    return facts | {"stages": [stages[name] for name in step.stages]}
