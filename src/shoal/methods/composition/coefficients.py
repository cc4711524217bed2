"""The samples on which coefficients are learned, for pieces that select or weight clients by their contribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from shoal.client.probe import SendSamples
from shoal.methods.composition.builder import MethodBuilder
from shoal.stages.contribution import Coefficients
from shoal.stages.prediction_similarity import SHARE_STAGE
from shoal.stages.query import QueryClients
from shoal.types import HasOptions, option

PUBLIC_SAMPLES = 50


@dataclass(frozen=True)
class SharedSamples(HasOptions):
    """Where the samples come from."""

    group: ClassVar[str] = "share"
    rows_of: Literal["public", "clients", "nobody"] = option(
        "public",
        "Samples on which the coefficients of contributions are learned: public samples that no client holds, labelled "
        "samples that clients give away, or none. Without samples all coefficients are equal.",
    )


def coefficients(method: MethodBuilder) -> Coefficients:
    """The same for selecting and for weighting: the first piece that asks decides where samples come from."""
    if method.coefficients is None:
        method.coefficients = _learned(method)
    return method.coefficients


def _learned(method: MethodBuilder) -> Coefficients:
    setting, model = method.setting, method.setting.model
    source = setting.make(SHARE_STAGE, SharedSamples).rows_of
    learn = Coefficients(model, steps=0) if source == "nobody" else setting.make("learn", Coefficients, model=model)
    split = method.training.split if method.training else "train"
    give = setting.make(SHARE_STAGE, SendSamples, shape=model.input_shape, labelled=True, rows=4, split=split)
    if source != "clients" or not learn.steps:
        setting.without_effect(SHARE_STAGE, "rows", unless="share.rows_of is clients and learn.steps is above 0")
    if source != "nobody" and not learn.steps:
        setting.without_effect(SHARE_STAGE, "rows_of", unless="learn.steps is above 0")
    if source == "clients" and learn.steps:
        method.stages["represent"].append(QueryClients(give, includes_late_clients=False, name=SHARE_STAGE))
        method.notes += (
            f"up to {give.num_samples} labelled rows of each of the first clients go to the server, to learn coefficients on",
        )
        return learn
    public = setting.want_public(PUBLIC_SAMPLES) if source == "public" and learn.steps else None
    if public is None or not len(public.y):
        method.notes += ("coefficients are equal: no rows were used to learn them",)
        return replace(learn, steps=0)
    method.notes += (f"coefficients are learned on {len(public.y)} public rows",)
    return replace(learn, public_samples=public)
