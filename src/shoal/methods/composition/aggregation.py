"""Builds the training stage of a method, which aggregates the models that the cohort trained.

The pieces in `methods/pieces/aggregate/` call `average_models` or `average_by_contribution`. The stages are in
`stages/train.py`, `stages/contribution.py` and `stages/global_and_experts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from shoal.methods.composition.coefficients import get_coefficients
from shoal.methods.composition.label_prior import ensure_label_stage
from shoal.stages.balanced import REPRESENT_STAGE
from shoal.stages.contribution import AggregateByContribution, Coefficients
from shoal.stages.global_and_experts import AggregateGlobalAndExperts
from shoal.stages.train import LearningRate, MeanFunction, TrainAndAggregate
from shoal.types import HasOptions, option


@dataclass(frozen=True)
class HeadAggregation(HasOptions):
    """Options for the aggregation of last layers where logits are adjusted."""

    group: ClassVar[str] = "train"
    classwise_head: bool = option(
        True,
        "Average the last layer class by class, each client weighted by its number of samples of the class. "
        "It applies where logits are adjusted.",
    )


def average_models(method: MethodBuilder, mean: MeanFunction | None = None) -> None:
    """Makes every model the weighted mean of the models that its members trained.

    A piece that calls this function provides `INDIVIDUAL_UPDATES` and `UPDATE_SUMMARIES`.

    Parameters
    ----------
    method : MethodBuilder
        The method, which already has its client program.
    mean : callable, optional
        Computes a model from the members' models and weights. Default: the weighted mean.
    """
    is_adjusted = isinstance(method.training, AdjustedTraining)
    stage_fields = training_stage_fields(method) | ({"mean": mean} if mean else {})
    if method.uses(TRAINING_METRICS):
        learned_coefficients = method.coefficients or Coefficients(method.setting.model, steps=0)
        method.aggregation = _contribution_stage(method, stage_fields, "size", learned_coefficients)
    elif method.provides(EXPERTS_BESIDE_GLOBAL) or (method.provides(ONE_MODEL) and is_adjusted):
        head = _classwise_head(method) if is_adjusted and mean is None else ()
        source = ensure_label_stage(method) if head else REPRESENT_STAGE
        method.aggregation = method.setting.make(
            "train", AggregateGlobalAndExperts, **stage_fields, classwise_head=head, source=source
        )
    else:
        if is_adjusted:
            method.notes += (
                "last layers are averaged as a whole: class by class is possible only if all clients share one model",
            )
        method.aggregation = method.setting.make("train", TrainAndAggregate, **stage_fields)


def average_by_contribution(method: MethodBuilder, weight_by: Literal["contribution", "cosine"]) -> None:
    """Weights clients by their contribution, or by their contribution and the cosine of their model."""
    method.aggregation = _contribution_stage(
        method, training_stage_fields(method), weight_by, get_coefficients(method), fixed_keys=("weighting",)
    )


def _contribution_stage(
    method: MethodBuilder,
    stage_fields: Mapping[str, Any],
    weight_by: str,
    learned_coefficients: Coefficients,
    fixed_keys: tuple[str, ...] = (),
) -> TrainAndAggregate:
    """Returns a stage that records contributions, even if clients are weighted by their number of samples."""
    stage_fields = {
        **stage_fields,
        "coefficients": learned_coefficients,
        "weight_by": weight_by,
        "cache_models": method.uses(PERSONAL_TRAINING),
    }
    return method.setting.make("train", AggregateByContribution, fixed_keys, **stage_fields)


def training_stage_fields(method: MethodBuilder) -> dict[str, Any]:
    """Returns the fields that every training stage has."""
    setting, training = method.setting, method.ensure_set(method.training, "training")
    return {
        "program": method.ensure_set(method.program, "client program"),
        "models_for": method.models_to_train,
        "rate": setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds),
        "trainable": setting.model.trainable,
        "remember": "summary" if method.uses(UPDATE_SUMMARIES) else "nothing",
    }


def _classwise_head(method: MethodBuilder) -> tuple[str, ...]:
    return method.setting.model.head if method.setting.make("train", HeadAggregation).classwise_head else ()
