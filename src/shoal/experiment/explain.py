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
from shoal.experiment.assemble import Bench, at_work, make_fleet
from shoal.methods.composition.piece import piece_class
from shoal.types import Method, Recipients, Schedule, Stage, StepSummary

IN_A_ROW = 3  # rounds
FIRST, USUAL = "in round 1", "in a usual later round"


@dataclass(frozen=True)
class Kind:
    """Rounds in which a stage asks the same clients; `played` are those, by index, that are played to see their
    costs."""

    asked: Recipients
    played: tuple[int, ...]


def kinds_of_rounds(schedule: Schedule, rounds: int) -> dict[str, Kind]:
    """By the words for them. A usual later round is none of those in which the schedule asks more clients. The first
    round of a kind stands alone, as round 1 does: clients may keep what they are sent in it."""
    later: dict[Recipients, list[int]] = {}
    for round in range(1, rounds):
        later.setdefault(schedule.clients_in(round), []).append(round)
    first = schedule.clients_in(0)
    kinds = {FIRST: Kind(first, (0,))}
    usual = next((asked for asked in (schedule.clients_otherwise, "none", schedule.clients) if asked in later), None)
    if usual is not None:
        early = tuple(round for round in later[usual] if round < IN_A_ROW)
        kinds[USUAL] = Kind(usual, early or (later[usual][0],))
    for asked, members in later.items():
        if asked in (usual, "none"):
            continue
        parts = (members,) if asked == first else (members[:1], members[1:])
        for part in filter(None, parts):
            words = "in round" if len(part) == 1 else "in a round such as"
            kinds[f"{words} {part[0] + 1}"] = Kind(asked, (part[0],))
    return kinds


def rounds_to_play(bench: Bench) -> list[int]:
    """By index: the first ones, and some of every other kind."""
    rounds = bench.job.rounds
    kinds = [kind for stage in bench.method.stages for kind in kinds_of_rounds(stage.schedule, rounds).values()]
    return sorted({*range(min(IN_A_ROW, rounds)), *(round for kind in kinds for round in kind.played)})


def explained(bench: Bench, on_round: Callable[[engine.Record], None] | None = None) -> dict[str, Any]:
    method, pages = bench.method, _played(bench, on_round)
    stages = {stage.name: _stage(stage, pages, bench.job.rounds) for stage in method.stages}
    return {
        "method": method.name,
        "clients": len(bench.federation),
        "parameters": bench.model.num_parameters,
        "rounds": bench.job.rounds,
        "steps": [_step(part, method, stages) for part in parts_of(method)],
        "notes": list(method.notes),
    }


def _played(bench: Bench, on_round: Callable[[engine.Record], None] | None) -> Sequence[LedgerEntry]:
    """Rounds in between are left out: what clients send depends on the round, and hardly on what was trained before."""
    ledger = Ledger(replace(bench.costs, battery_joules=None, budget_joules=None))
    fleet, state = make_fleet(bench), bench.method.init(bench.job.seed)
    with at_work(bench, fleet):
        for count, round in enumerate(rounds_to_play(bench), start=1):
            state = replace(state, round=round)
            state, record, _ = engine.run_round(bench.method, fleet, state, bench.job.seed, ledger, Timer())
            if on_round is not None:
                on_round(replace(record, round=count))  # a bar counts the rounds that are played
    return ledger.entries


def parts_of(method: Method) -> Sequence[StepSummary]:
    """Of a method that is not composed of named pieces, its stages; before pieces, stages that are of none, such as
    those of edges."""
    laid = {name for part in method.steps for name in part.stages}
    return [*(StepSummary("", s.name, (s.name,)) for s in method.stages if s.name not in laid), *method.steps]


def _stage(stage: Stage, pages: Sequence[LedgerEntry], rounds: int) -> dict[str, Any]:
    kinds, own = kinds_of_rounds(stage.schedule, rounds), [p for p in pages if p.stage == stage.name]
    costs = {words: _costs(kind, own) for words, kind in kinds.items()}
    return {"stage": stage.name, "schedule": stage.schedule.to_json(), "costs": costs}


def _costs(kind: Kind, pages: Sequence[LedgerEntry]) -> dict[str, Any]:
    """Of all clients together, in one round."""
    played = [p for p in pages if p.round - 1 in kind.played]
    count = len(kind.played)
    return {
        "asked": kind.asked,
        "rounds": [round + 1 for round in kind.played],
        "clients": sum(len(p.clients) for p in played) / count,
        "bytes_down": sum(float(p.bytes_down.sum()) for p in played) / count,
        "bytes_up": sum(float(p.bytes_up.sum()) for p in played) / count,
        "joules": sum(float(p.joules.sum()) for p in played) / count,
    }


def _step(part: StepSummary, method: Method, stages: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    said = {"step": part.step, "piece": part.piece}
    if part.step:
        piece = piece_class(part.step, part.piece)
        said |= {
            "source": piece.source,
            "client_sends": piece.client_sends,
            "client_keeps": piece.client_keeps,
            "server_learns": piece.server_learns,
            "remark": piece.remark,
        }
    else:
        stage = next(s for s in method.stages if s.name == part.piece)
        inside = getattr(stage, "stage", stage)  # of a stage that every edge plays
        said["what"] = (type(inside).__doc__ or "").split("\n\n")[0].replace("\n   ", "").strip()
    return said | {"stages": [stages[name] for name in part.stages]}
