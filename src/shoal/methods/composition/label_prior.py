"""Clients that know how often their classes occur."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.client.prior import CountLabels
from shoal.errors import UserError
from shoal.methods.composition.builder import Draft
from shoal.stages.query import AskOnce

PRIOR = "prior"


@dataclass(frozen=True)
class Serving:
    alpha: float = 0.1  # rows of each class that a client is taken to have beside its own

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise UserError(f"serve.alpha is {self.alpha}; it must be above 0")


def alpha(d: Draft) -> float:
    return d.s.make("serve", Serving).alpha


def count_labels(d: Draft) -> None:
    """Each counts for itself; nothing of it is told."""
    if not any(stage.name == PRIOR for stage in d.stages["represent"]):
        counting = CountLabels(d.s.model.classes, d.s.model.device)
        d.stages["represent"].append(d.s.make(PRIOR, AskOnce, program=counting, name=PRIOR))
