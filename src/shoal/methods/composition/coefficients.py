"""On which rows coefficients are learned, for pieces that choose or weigh clients by what they contribute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.client.probe import ShareRows
from shoal.methods.composition.builder import Draft
from shoal.stages.contribution import Coefficients
from shoal.stages.prediction_similarity import SHARE
from shoal.stages.query import AskOnce

PUBLIC_ROWS = 50


@dataclass(frozen=True)
class Shared:
    rows_of: Literal["public", "clients", "nobody"] = "public"


def coefficients(d: Draft) -> Coefficients:
    """The same for choosing and for weighing: whoever comes first says where the rows come from."""
    if d.coefficients is None:
        d.coefficients = _shared(d)
    return d.coefficients


def _shared(d: Draft) -> Coefficients:
    s = d.s
    of = s.make(SHARE, Shared).rows_of
    learn = Coefficients(s.model, steps=0) if of == "nobody" else s.make("learn", Coefficients, model=s.model)
    if of == "clients" and learn.steps:
        given = {"shape": s.model.input_shape, "labelled": True, "rows": 4, "split": d.made["split"]}
        give = s.make(SHARE, ShareRows, **given)
        d.stages["represent"].append(AskOnce(give, newcomers=False, name=SHARE))
        d.notes += (
            f"up to {give.rows} labelled rows of each of the first clients go to the server, to learn coefficients on",
        )
        return learn
    public = s.want_public(PUBLIC_ROWS) if of == "public" and learn.steps else None
    if public is None or not len(public.y):
        d.notes += ("coefficients are equal: no rows were used to learn them",)
        return replace(learn, steps=0)
    d.notes += (f"coefficients are learned on {len(public.y)} public rows",)
    return replace(learn, public=public)
