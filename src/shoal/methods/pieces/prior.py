"""Clients that know how often their classes occur."""

from __future__ import annotations

from shoal.client.prior import CountLabels
from shoal.methods.draft import Draft
from shoal.stages.represent import AskOnce

PRIOR = "prior"


def count_labels(d: Draft) -> None:
    """Each counts for itself; nothing of it is told."""
    if not any(stage.name == PRIOR for stage in d.stages["represent"]):
        counting = CountLabels(d.s.model.classes, d.s.model.device)
        d.stages["represent"].append(d.s.make(PRIOR, AskOnce, program=counting, name=PRIOR))
