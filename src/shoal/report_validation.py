"""Decides which reports of clients the stages of the server may read.

What a report must look like follows from its program: a run of the program on no samples gives a report with the same
names, shapes and types. A report that looks different, or that has values that are not finite, is rejected with one
reason. The size of finite values is not limited here.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal import tree
from shoal.types import ClientId, ClientProgram, Params, Plan, Report, Task

log = logging.getLogger(__name__)

MAX_SAMPLES = 10**9  # no client has more samples of a split
FRACTIONS = frozenset(("accuracy", "hits", "kept"))  # metrics whose sum is between 0 and their count


@dataclass(frozen=True)
class ReportSpec:
    """The names, shapes and types that the report of a task must have."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)  # by path
    metrics: frozenset[str] = frozenset()
    may_be_empty: bool = False  # whether a report without tensors is accepted, too

    @classmethod
    def from_report(cls, report: Report, may_be_empty: bool = False) -> ReportSpec:
        """Returns the specification that this report fits."""
        tensors = {path: (tuple(x.shape), x.dtype) for path, x in tree.flatten(report.tensors).items()}
        return cls(tensors, frozenset(report.metrics), may_be_empty)


@runtime_checkable
class HasReportSpec(Protocol):
    """A program whose reports cannot be told from a run without samples."""

    def report_spec(self, task: Task) -> ReportSpec | None:
        """Returns what the report of the task must look like, or None if this is not known."""


def expected_report(program: ClientProgram, task: Task) -> ReportSpec | None:
    """Returns what the report of a task must look like.

    The program may declare it (`report_spec`). Otherwise the program is run here on no samples and without private
    state. Random draws of the program change no other random number.

    Returns
    -------
    ReportSpec or None
        None if the program cannot run without samples. Then only the values of its reports are checked.
    """
    if isinstance(program, HasReportSpec):
        return program.report_spec(task)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(task.seed)
            state = program.begin(task, {})
            for phase in program.phases:
                state = phase.on_end(state)
            report, _ = program.end(task, state, defaultdict(int))
        return ReportSpec.from_report(report)
    except Exception as error:  # a user's program may do anything
        log.debug("Program %r does not run without samples, so only values are checked: %s", program.name, error)
        return None


def rejection_reasons(plan: Plan, reports: Mapping[ClientId, Report]) -> dict[ClientId, str]:
    """Returns the reason for every report of the plan that must not be used.

    Clients with the same program and with tasks of the same names and shapes share one specification.
    """
    specs: dict[Any, ReportSpec | None] = {}
    signatures: dict[int, Any] = {}  # by identity, because many clients receive the same model

    def signature_of(model: Params) -> Any:
        if id(model) not in signatures:
            signatures[id(model)] = tree.signature(model)
        return signatures[id(model)]

    reasons = {}
    for client, report in reports.items():
        task, program = plan.tasks.get(client), plan.program_of_client.get(client, plan.program)
        if task is None or program is None:
            reasons[client] = "the client has no task"
            continue
        models = tuple((name, signature_of(model)) for name, model in sorted(task.models.items()))
        key = (program.name, models, tuple(sorted(task.config)))
        if key not in specs:
            specs[key] = expected_report(program, task)
        if reason := rejection_reason(specs[key], report):
            reasons[client] = reason
    return reasons


def rejection_reason(spec: ReportSpec | None, report: Report) -> str | None:
    """Returns why a report must not be used, or None if it may be used.

    Parameters
    ----------
    spec
        What the report must look like. None if this is not known: then only values are checked.
    report
        The report. Whatever it contains, no exception is raised.
    """
    try:
        tensors = tree.flatten(report.tensors)
        return (
            _reason_in_structure(spec, tensors, report)
            or _reason_in_values(tensors)
            or _reason_in_metrics(report.metrics)
            or _reason_in_counts(report)
        )
    except Exception as error:
        return f"the report cannot be read ({type(error).__name__})"


def has_only_finite_values(report: Report) -> bool:
    """Returns whether all tensors and metrics of a report can be read and are finite."""
    try:
        metrics_are_finite = all(math.isfinite(x) for pair in report.metrics.values() for x in pair)
        return metrics_are_finite and _reason_in_values(tree.flatten(report.tensors)) is None
    except Exception:
        return False


def _reason_in_structure(spec: ReportSpec | None, tensors: Mapping[str, Tensor], report: Report) -> str | None:
    """Returns why names, shapes or types are not those of the specification."""
    if spec is None:
        return None
    if tensors or not spec.may_be_empty:
        if missing := sorted(spec.tensors.keys() - tensors.keys()):
            return f"tensor {missing[0]!r} is missing"
        if unknown := sorted(tensors.keys() - spec.tensors.keys()):
            return f"tensor {unknown[0]!r} is not expected"
        for path, (shape, dtype) in spec.tensors.items():
            if tuple(tensors[path].shape) != shape:
                return f"tensor {path!r} has shape {_text(tensors[path].shape)} instead of {_text(shape)}"
            if tensors[path].dtype != dtype:
                return f"tensor {path!r} has type {tensors[path].dtype} instead of {dtype}"
    if missing := sorted(spec.metrics - report.metrics.keys()):
        return f"metric {missing[0]!r} is missing"
    if unknown := sorted(report.metrics.keys() - spec.metrics):
        return f"metric {unknown[0]!r} is not expected"
    return None


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"


def _reason_in_values(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the first tensor with values that are not finite."""
    for path, x in tensors.items():
        # The sum is quicker, and it is finite only if all values are. It may overflow, so it cannot reject.
        if (x.is_floating_point() or x.is_complex()) and not (
            bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
        ):
            return f"tensor {path!r} has values that are not finite"
    return None


def _reason_in_metrics(metrics: Mapping[str, Any]) -> str | None:
    """Returns the first metric whose sum or count is impossible."""
    for name, pair in metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(x, Real) for x in pair):
            return f"metric {name!r} is not a sum and a count"
        total, count = map(float, pair)
        if not math.isfinite(total) or not math.isfinite(count):
            return f"metric {name!r} has values that are not finite"
        if count < 0:
            return f"metric {name!r} has the count {count:g}, which is below 0"
        if name in FRACTIONS and not 0 <= total <= count:
            return f"metric {name!r} has the sum {total:g}, which is not between 0 and its count {count:g}"
    return None


def _reason_in_counts(report: Report) -> str | None:
    """Returns the first number of samples or of operations that is impossible."""
    for split, n in report.counts.items():
        if not isinstance(n, Integral) or not 0 <= int(n) <= MAX_SAMPLES:
            return f"the number of samples of {split!r} is {n}, which is not a whole number from 0 to {MAX_SAMPLES}"
    if not isinstance(report.flops, Real) or not report.flops >= 0:
        return f"the number of operations is {report.flops}, which is not 0 or more"
    return None
