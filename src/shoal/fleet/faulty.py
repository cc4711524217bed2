"""A fleet in which given clients report nonsense or do not respond, to measure what a run does about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal import tree
from shoal.errors import UserError
from shoal.types import ClientId, Fleet, Params, Plan, Report

FaultKind = Literal["drop", "nan", "scale", "shape", "name"]
SPOILED = "spoiled"  # an unexpected tensor, or the end of the wrong name of a tensor


@dataclass(frozen=True)
class Fault:
    """What is wrong with some reports of a client.

    - `drop`: the client works, but its report does not arrive.
    - `nan`: every floating tensor contains a NaN.
    - `scale`: every floating tensor is multiplied by `factor`.
    - `shape`: the first tensor has one dimension too many.
    - `name`: the first tensor has another name.

    A report without a tensor that could be spoiled gets an unexpected one instead, except by `scale`.
    """

    client: ClientId
    kind: FaultKind
    rounds: Collection[int] | None = None  # counted from 1; None for all
    stages: Collection[str] | None = None  # by name; None for all
    factor: float = 1e6  # of `scale`

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise UserError(f"kind is {self.kind!r}; it must be one of {', '.join(get_args(FaultKind))}")

    def applies_to(self, plan: Plan) -> bool:
        """Returns whether reports of this plan are spoiled. Evaluations, which no stage plans, never are."""
        return (
            bool(plan.stage)
            and (self.rounds is None or plan.round in self.rounds)
            and (self.stages is None or plan.stage in self.stages)
        )

    def spoil(self, report: Report) -> Report | None:
        """Returns the report with the fault, or None if it does not arrive."""
        if self.kind == "drop":
            return None
        if self.kind == "scale":
            return replace(report, tensors=tree.map_leaves(self._scaled, report.tensors))
        spoiled = _with_nan(report) if self.kind == "nan" else _with_wrong_tensor(report, self.kind)
        return spoiled or replace(report, tensors={**report.tensors, SPOILED: {SPOILED: torch.tensor(torch.nan)}})

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.factor if x.is_floating_point() else x


def _with_nan(report: Report) -> Report | None:
    """Returns the report with a NaN in every floating tensor, or None if there is no such tensor."""
    if not any(x.is_floating_point() and x.numel() for x in tree.leaves(report.tensors)):
        return None

    def spoil(x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel():
            return x
        spoiled = x.detach().clone().contiguous()
        spoiled.view(-1)[0] = torch.nan
        return spoiled

    return replace(report, tensors=tree.map_leaves(spoil, report.tensors))


def _with_wrong_tensor(report: Report, kind: FaultKind) -> Report | None:
    """Returns the report with the shape or the name of its first tensor changed, or None if it has no tensor."""
    paths = [(group, name) for group, params in sorted(report.tensors.items()) for name in sorted(params)]
    if not paths:
        return None
    group, name = paths[0]
    params: Params = dict(report.tensors[group])
    if kind == "shape":
        params[name] = params[name].unsqueeze(0)
    else:
        params[f"{name}-{SPOILED}"] = params.pop(name)
    return replace(report, tensors={**report.tensors, group: params})


class FaultyFleet:
    """Executes plans on another fleet and spoils or drops reports afterwards. The clients have done their work.

    Parameters
    ----------
    fleet
        The fleet that executes the plans.
    faults
        The faults. A mapping from clients to kinds means faults in all stages of all rounds.
    """

    def __init__(self, fleet: Fleet, faults: Sequence[Fault] | Mapping[ClientId, FaultKind]) -> None:
        self.fleet = fleet
        self.faults = (
            tuple(Fault(client, kind) for client, kind in faults.items())
            if isinstance(faults, Mapping)
            else tuple(faults)
        )

    def roster(self) -> tuple[ClientId, ...]:
        """Returns the clients of the other fleet."""
        return self.fleet.roster()

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Returns the reports of the other fleet with the faults that apply, in their order."""
        reports = dict(self.fleet.execute(plan))
        for fault in self.faults:
            if fault.client in reports and fault.applies_to(plan):
                report = fault.spoil(reports.pop(fault.client))
                if report is not None:
                    reports[fault.client] = report
        return reports
