"""What a method does, step by step: who sends and learns what, where it is from, when, and what a round of it costs.

Words come from the pieces, rounds from the schedules of the stages; bytes and joules from rounds that are really played
on the job's data: the first three, and those of other kinds that a schedule has later in the run.
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

NUM_FIRST_ROUNDS = 3  # rounds
FIRST_ROUND, USUAL_LATER_ROUND = "in round 1", "in a usual later round"


@dataclass(frozen=True)
class RoundKind:
    """Rounds in which a stage asks the same clients; `played` are those, by index, that are played to see their
    costs."""

    recipients: Recipients
    run_rounds: tuple[int, ...]


def round_kinds(schedule: Schedule, rounds: int) -> dict[str, RoundKind]:
    """By the words for them. A usual later round is none of those in which the schedule asks more clients. The first
    round of a kind stands alone, as round 1 does: clients may keep what they are sent in it."""
    later: dict[Recipients, list[int]] = {}
    for round in range(1, rounds):
        later.setdefault(schedule.clients_in(round), []).append(round)
    first = schedule.clients_in(0)
    kinds = {FIRST_ROUND: RoundKind(first, (0,))}
    usual = next((asked for asked in (schedule.clients_otherwise, "none", schedule.clients) if asked in later), None)
    if usual is not None:
        early = tuple(round for round in later[usual] if round < NUM_FIRST_ROUNDS)
        kinds[USUAL_LATER_ROUND] = RoundKind(usual, early or (later[usual][0],))
    for asked, members in later.items():
        if asked in (usual, "none"):
            continue
        parts = (members,) if asked == first else (members[:1], members[1:])
        for part in filter(None, parts):
            words = "in round" if len(part) == 1 else "in a round such as"
            kinds[f"{words} {part[0] + 1}"] = RoundKind(asked, (part[0],))
    return kinds


def rounds_to_run(experiment: Experiment) -> list[int]:
    """By index: the first ones, and some of every other kind."""
    rounds = experiment.job.rounds
    kinds = [kind for stage in experiment.method.stages for kind in round_kinds(stage.schedule, rounds).values()]
    return sorted({*range(min(NUM_FIRST_ROUNDS, rounds)), *(round for kind in kinds for round in kind.run_rounds)})


def explain_method(
    experiment: Experiment, on_round: Callable[[engine.RoundRecord], None] | None = None
) -> dict[str, Any]:
    method, entries = experiment.method, _run_rounds(experiment, on_round)
    stages = {stage.name: _stage_facts(stage, entries, experiment.job.rounds) for stage in method.stages}
    return {
        "method": method.name,
        "clients": len(experiment.federation),
        "parameters": experiment.model.num_parameters,
        "rounds": experiment.job.rounds,
        "steps": [_step_facts(part, method, stages) for part in steps_of(method)],
        "notes": list(method.notes),
    }


def _run_rounds(experiment: Experiment, on_round: Callable[[engine.RoundRecord], None] | None) -> Sequence[LedgerEntry]:
    """Rounds in between are left out: what clients send depends on the round, and hardly on what was trained before."""
    ledger = Ledger(replace(experiment.costs, battery_joules=None, budget_joules=None))
    fleet, state = make_fleet(experiment), experiment.method.init(experiment.job.seed)
    with fleet_session(experiment, fleet):
        for count, round in enumerate(rounds_to_run(experiment), start=1):
            state = replace(state, round=round)
            state, record, _ = engine.run_round(experiment.method, fleet, state, experiment.job.seed, ledger, Timer())
            if on_round is not None:
                on_round(replace(record, round=count))  # a bar counts the rounds that are played
    return ledger.entries


def steps_of(method: Method) -> Sequence[StepSummary]:
    """Of a method that is not composed of named pieces, its stages; before pieces, stages that are of none, such as
    those of edges."""
    covered_stages = {name for part in method.steps for name in part.stages}
    return [*(StepSummary("", s.name, (s.name,)) for s in method.stages if s.name not in covered_stages), *method.steps]


def _stage_facts(stage: Stage, entries: Sequence[LedgerEntry], rounds: int) -> dict[str, Any]:
    kinds, own = round_kinds(stage.schedule, rounds), [p for p in entries if p.stage == stage.name]
    costs = {words: _mean_costs(kind, own) for words, kind in kinds.items()}
    return {"stage": stage.name, "schedule": stage.schedule.to_json(), "costs": costs}


def _mean_costs(kind: RoundKind, entries: Sequence[LedgerEntry]) -> dict[str, Any]:
    """Of all clients together, in one round."""
    run_entries = [p for p in entries if p.round - 1 in kind.run_rounds]
    count = len(kind.run_rounds)
    return {
        "asked": kind.recipients,
        "rounds": [round + 1 for round in kind.run_rounds],
        "clients": sum(len(p.clients) for p in run_entries) / count,
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
        inside = getattr(stage, "stage", stage)  # of a stage that every edge plays
        facts["what"] = (type(inside).__doc__ or "").split("\n\n")[0].replace("\n   ", "").strip()
    return facts | {"stages": [stages[name] for name in step.stages]}
