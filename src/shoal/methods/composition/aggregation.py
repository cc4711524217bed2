"""The training stage of a method: how what the cohort trained becomes new models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shoal.client.prior import AdjustedTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    EXPERTS_BESIDE_GLOBAL,
    ONE_MODEL,
    PERSONAL_TRAINING,
    TRAINING_METRICS,
    UPDATE_SUMMARIES,
)
from shoal.methods.composition.label_prior import label_stage
from shoal.stages.balanced import TOLD
from shoal.stages.contribution import Coefficients, FederateByContribution
from shoal.stages.global_and_experts import FederateBeside
from shoal.stages.train import Federate, Rate
from shoal.types import HasOptions, option


@dataclass(frozen=True)
class HeadAggregation(HasOptions):
    """How last layers are aggregated where logits are adjusted."""

    group: ClassVar[str] = "train"
    head: bool = option(
        True,
        "Average the last layer class by class, each client weighted by its number of samples of the class. "
        "It applies where logits are adjusted.",
    )


def average_models(method: MethodBuilder) -> None:
    """Every model becomes the weighted mean of what its members trained."""
    adjusted = isinstance(method.training, AdjustedTraining)
    if method.uses(TRAINING_METRICS):
        average_by_contribution(method, "size", method.coefficients or Coefficients(method.setting.model, steps=0))
    elif method.provides(EXPERTS_BESIDE_GLOBAL) or (method.provides(ONE_MODEL) and adjusted):
        head = _classwise_head(method) if adjusted else ()
        source = label_stage(method) if head else TOLD
        method.aggregation = method.setting.make("train", FederateBeside, **common(method), head=head, source=source)
    else:
        if adjusted:
            method.notes += ("last layers are averaged as a whole: class by class only where all share one model",)
        remember = "summary" if method.uses(UPDATE_SUMMARIES) else "nothing"
        method.aggregation = method.setting.make("train", Federate, **common(method), remember=remember)


def average_by_contribution(
    method: MethodBuilder, by: Literal["size", "contribution", "cosine"], learned: Coefficients
) -> None:
    """Clients are weighted by their contribution, or by their size where contributions are only recorded."""
    fixed = () if by == "size" else ("weighting",)
    given = {**common(method), "coefficients": learned, "by": by, "reuse": method.uses(PERSONAL_TRAINING)}
    method.aggregation = method.setting.make("train", FederateByContribution, fixed, **given)


def common(method: MethodBuilder) -> dict[str, Any]:
    """What every training stage is made of."""
    setting, training = method.setting, method.required(method.training, "training")
    rate = setting.make("train", Rate, lr=training.lr, rounds=setting.rounds)
    program, trainable = method.required(method.program, "client program"), setting.model.trainable
    return {"program": program, "models_for": method.models_to_train, "rate": rate, "trainable": trainable}


def _classwise_head(method: MethodBuilder) -> tuple[str, ...]:
    return method.setting.model.head if method.setting.make("train", HeadAggregation).head else ()
