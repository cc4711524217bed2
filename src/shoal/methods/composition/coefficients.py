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

NUM_PUBLIC_SAMPLES = 50


@dataclass(frozen=True)
class SharedSamples(HasOptions):
    """Where the samples come from."""

    group: ClassVar[str] = "share"
    source: Literal["public", "clients", "nobody"] = option(
        "public",
        "Samples on which the coefficients of contributions are learned: public samples that no client holds, labelled "
        "samples that clients give away, or none. Without samples all coefficients are equal.",
    )


def get_coefficients(method: MethodBuilder) -> Coefficients:
    """The same for selecting and for weighting: the first piece that asks decides where samples come from."""
    if method.coefficients is None:
        method.coefficients = _build_coefficients(method)
    return method.coefficients


def _build_coefficients(method: MethodBuilder) -> Coefficients:
    setting, model = method.setting, method.setting.model
    source = setting.make(SHARE_STAGE, SharedSamples).source
    coefficients = (
        Coefficients(model, steps=0) if source == "nobody" else setting.make("learn", Coefficients, model=model)
    )
    split = method.training.split if method.training else "train"
    share_samples = setting.make(SHARE_STAGE, SendSamples, shape=model.input_shape, labelled=True, rows=4, split=split)
    if source != "clients" or not coefficients.steps:
        setting.mark_without_effect(SHARE_STAGE, "rows", unless="share.rows_of is clients and learn.steps is above 0")
    if source != "nobody" and not coefficients.steps:
        setting.mark_without_effect(SHARE_STAGE, "rows_of", unless="learn.steps is above 0")
    if source == "clients" and coefficients.steps:
        method.stages["represent"].append(QueryClients(share_samples, includes_late_clients=False, name=SHARE_STAGE))
        method.notes += (
            f"up to {share_samples.num_samples} labelled rows of each of the first clients go to the server, to learn coefficients on",
        )
        return coefficients
    public_samples = (
        setting.request_public_samples(NUM_PUBLIC_SAMPLES) if source == "public" and coefficients.steps else None
    )
    if public_samples is None or not len(public_samples.y):
        method.notes += ("coefficients are equal: no rows were used to learn them",)
        return replace(coefficients, steps=0)
    method.notes += (f"coefficients are learned on {len(public_samples.y)} public rows",)
    return replace(coefficients, public_samples=public_samples)
