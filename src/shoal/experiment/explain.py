"""What a method does, step by step: who sends and learns what, where it is from, and what a round of it costs.

Words come from the pieces; bytes and joules from rounds that are really played on the job's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal import engine
from shoal.cost.ledger import Ledger, Page
from shoal.cost.timer import Timer
from shoal.experiment.assemble import Bench, at_work, make_fleet
from shoal.methods.composition.piece import piece_class
from shoal.types import Method, Part, Stage

ROUNDS = 3
FIRST, LATER, DUE = "in round 1", "in a later round", "when it is due"


@dataclass(frozen=True)
class DueNow:
    """A stage out of its turn, so that its cost is known although its round is far away."""

    stage: Stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)

    def due(self, round: int) -> bool:
        return True


def explained(
    bench: Bench, rounds: int = ROUNDS, on_round: Callable[[engine.Record], None] | None = None
) -> dict[str, Any]:
    method, ledger = bench.method, Ledger(replace(bench.costs, battery_joules=None, budget_joules=None))
    seldom = [s.name for s in method.stages if not any(s.due(r) for r in range(rounds))]
    fleet, state = make_fleet(bench), method.init(bench.job.seed)
    with at_work(fleet):
        for turn in range(rounds + bool(seldom)):
            played = method if turn < rounds else _all_due(method)
            state, record, _ = engine.play_round(played, fleet, state, bench.job.seed, ledger, Timer())
            if on_round is not None:
                on_round(record)
    costs = {s.name: _costs(s.name, s.name in seldom, ledger.pages, rounds) for s in method.stages}
    schedule = {s.name: [r + 1 for r in range(bench.job.rounds) if s.due(r)] for s in method.stages}
    return {
        "method": method.name,
        "clients": len(bench.federation),
        "parameters": bench.model.parameters,
        "steps": [_step(part, method, costs, schedule, bench.job.rounds) for part in parts_of(method)],
        "notes": list(method.notes),
    }


def _all_due(method: Method) -> Method:
    return replace(method, stages=tuple(DueNow(stage) for stage in method.stages))


def parts_of(method: Method) -> Sequence[Part]:
    """Of a method that is not composed of named pieces, its stages."""
    return method.parts or [Part("", s.name, (s.name,)) for s in method.stages]


def _costs(stage: str, seldom: bool, pages: Sequence[Page], rounds: int) -> dict[str, dict[str, float]]:
    """Of all clients together; a stage that is seldom due was played once, after the others."""
    if seldom:
        return {DUE: _total([p for p in pages if p.stage == stage and p.round == rounds + 1], 1)}
    first = [p for p in pages if p.stage == stage and p.round == 1]
    later = [p for p in pages if p.stage == stage and 1 < p.round <= rounds]
    return {FIRST: _total(first, 1), LATER: _total(later, max(1, rounds - 1))}


def _total(pages: Sequence[Page], rounds: int) -> dict[str, float]:
    return {
        "clients": sum(len(p.clients) for p in pages) / rounds,
        "bytes_down": sum(float(p.bytes_down.sum()) for p in pages) / rounds,
        "bytes_up": sum(float(p.bytes_up.sum()) for p in pages) / rounds,
        "joules": sum(float(p.joules.sum()) for p in pages) / rounds,
    }


def _step(
    part: Part,
    method: Method,
    costs: dict[str, dict[str, dict[str, float]]],
    schedule: dict[str, list[int]],
    rounds: int,
) -> dict[str, Any]:
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
        inside = getattr(stage, "stage", stage)
        said["what"] = (type(inside).__doc__ or "").split("\n\n")[0].replace("\n   ", "").strip()
    stages = [{"stage": s, "due": _when(schedule[s], rounds), **costs[s]} for s in part.stages]
    return said | {"stages": stages}


def _when(due: Sequence[int], rounds: int) -> str:
    if len(due) == rounds:
        return "every round"
    if not due:
        return "never"
    shown = ", ".join(map(str, due[:3]))
    return f"round {shown}" if len(due) <= 3 else f"rounds {shown}, ... ({len(due)} of {rounds})"
