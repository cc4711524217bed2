"""Chooses the samples on which coefficients of contributions are learned, for pieces that select or weight by them."""

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
    """Options for the samples on which coefficients are learned."""

    group: ClassVar[str] = "share"
    source: Literal["public", "clients", "none"] = option(
        "public",
        "Learn the coefficients of contributions on public samples (public), on labelled samples that clients send "
        "(clients), or not at all (none), which leaves all coefficients equal.",
    )


def get_coefficients(method: MethodBuilder) -> Coefficients:
    """Returns the coefficients of the method. Selection and aggregation share them; the first call creates them."""
    if method.coefficients is None:
        method.coefficients = _build_coefficients(method)
    return method.coefficients


def _build_coefficients(method: MethodBuilder) -> Coefficients:
    setting, model = method.setting, method.setting.model
    source = setting.make(SHARE_STAGE, SharedSamples).source
    coefficients = (
        Coefficients(model, steps=0) if source == "none" else setting.make("coefficients", Coefficients, model=model)
    )
    split = method.training.split if method.training else "train"
    share_samples = setting.make(
        SHARE_STAGE, SendSamples, input_shape=model.input_shape, sends_labels=True, num_samples=4, split=split
    )
    if source != "clients" or not coefficients.steps:
        setting.mark_without_effect(
            SHARE_STAGE, "num_samples", unless="share.source is clients and coefficients.steps is above 0"
        )
    if source != "none" and not coefficients.steps:
        setting.mark_without_effect(SHARE_STAGE, "source", unless="coefficients.steps is above 0")
    if source == "clients" and coefficients.steps:
        method.stages["represent"].append(QueryClients(share_samples, includes_late_clients=False, name=SHARE_STAGE))
        method.notes += (
            f"up to {share_samples.num_samples} labelled samples of each client of the first round go to the server, "
            "which learns coefficients on them",
        )
        return coefficients
    public_samples = (
        setting.request_public_samples(NUM_PUBLIC_SAMPLES) if source == "public" and coefficients.steps else None
    )
    if public_samples is None or not len(public_samples.y):
        method.notes += ("coefficients are equal, because no samples were used to learn them",)
        return replace(coefficients, steps=0)
    method.notes += (f"coefficients are learned on {len(public_samples.y)} public samples",)
    return replace(coefficients, public_samples=public_samples)
