"""Builds the client program of a method: how a model is trained, and which of several models a client trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shoal.client.model_choice import ChooseAndTrain
from shoal.client.multi_model import TrainAllModels
from shoal.client.train import LocalTraining
from shoal.client.training_metrics import MeasuredTraining
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import EXPERTS_BESIDE_GLOBAL, OVERLAPPING_CLUSTERS, TRAINING_METRICS
from shoal.types import HasOptions, option


@dataclass(frozen=True)
class ExpertChoice(HasOptions):
    """Options for the choice of the expert that a client of several clusters trains."""

    group: ClassVar[str] = "train"
    validation_split: Literal["val", "train"] = option(
        "val",
        "Compare the accuracy of experts on the client's validation samples (val) or on its training samples (train).",
        value_without_validation="train",
    )


def set_training(method: MethodBuilder, training_class: type[LocalTraining], **defaults: Any) -> None:
    """Lets the cohort train one model, the global model and an expert, or the best of several experts.

    Parameters
    ----------
    method : MethodBuilder
        The method that is built.
    training_class : type
        The program that trains one model, such as `LocalTraining`.
    **defaults
        Values of options of the program that differ from its own defaults.
    """
    program_class = MeasuredTraining if method.uses(TRAINING_METRICS) else training_class
    program = method.setting.make_training("train", program_class, **defaults)
    method.training = method.program = program
    if method.provides(EXPERTS_BESIDE_GLOBAL):
        method.program = TrainAllModels(program)
    if method.provides(OVERLAPPING_CLUSTERS):
        split = method.setting.make("train", ExpertChoice).validation_split
        method.validation_split = split if program.sensitivity == "all" else f"{split}/{program.sensitivity}"
        method.program = ChooseAndTrain(program, "hits", method.validation_split)
