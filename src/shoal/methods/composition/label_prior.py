"""Adds the stages in which clients report label distributions or count their labels, for the pieces that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.client.histogram import LabelHistogram
from shoal.client.prior import CountLabels
from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.methods.composition.capability import LABEL_DISTRIBUTIONS
from shoal.methods.composition.setting import Setting
from shoal.stages.balanced import REPRESENT_STAGE
from shoal.stages.query import QueryClients
from shoal.types import HasOptions, option

PRIOR_STAGE = "prior"
LABEL_STAGE = "labels"  # the stage in which label distributions are reported where the representation is another one


@dataclass(frozen=True)
class PriorSmoothing(HasOptions):
    """Options for the smoothing of a client's class prior."""

    group: ClassVar[str] = "serve"
    pseudocount: float = option(
        0.1, "Add this many samples of every class to a client's label counts, so that no class prior is 0.", gt=0
    )


@dataclass(frozen=True)
class CountLabelsForPrior(QueryClients):
    """Lets every client count its labels for its class prior. The counts stay with the client."""

    every_rounds: int = option(
        0, "Let all clients count their labels again after this many rounds. 0 lets them count once.", ge=0
    )


def prior_pseudocount(method: MethodBuilder) -> float:
    """Returns the pseudocount of the class prior, `serve.pseudocount`."""
    return method.setting.make("serve", PriorSmoothing).pseudocount


def count_labels(method: MethodBuilder) -> None:
    """Lets every client count its labels, once. The counts stay with the client."""
    if not any(stage.name == PRIOR_STAGE for stage in method.stages["represent"]):
        counting = CountLabels(method.setting.model.num_classes, method.setting.model.device)
        method.stages["represent"].append(
            method.setting.make(PRIOR_STAGE, CountLabelsForPrior, program=counting, name=PRIOR_STAGE)
        )


def has_label_stage(method: MethodBuilder) -> bool:
    """Returns whether clients report label distributions in a stage that was added so far."""
    return method.provides(LABEL_DISTRIBUTIONS) or any(
        stage.name == LABEL_STAGE for stage in method.stages["represent"]
    )


def ensure_label_stage(method: MethodBuilder) -> str:
    """Returns the name of the stage in which clients report label distributions, which is added if it is missing."""
    if method.provides(LABEL_DISTRIBUTIONS):
        return REPRESENT_STAGE
    if not has_label_stage(method):
        split = method.training.split if method.training else "train"
        method.stages["represent"].append(label_query(method.setting, LABEL_STAGE, split))
    return LABEL_STAGE


def label_distributions(method: MethodBuilder) -> ClientColumn:
    """Returns the label distributions of clients. Clients report them once, however many pieces use them."""
    return ClientColumn("labels", ensure_label_stage(method))


def label_query(setting: Setting, stage_name: str, split: str = "train") -> QueryClients:
    """Returns a stage in which clients report their label distributions."""
    program = setting.make(
        stage_name, LabelHistogram, num_classes=setting.model.num_classes, split=split, name=stage_name
    )
    query = setting.make(stage_name, QueryClients, program=program, name=stage_name)
    if not query.every_rounds:  # then a client releases its label distribution only once
        setting.mark_without_effect(
            stage_name,
            "rerelease_threshold",
            unless=f"{stage_name}.noise_scale and {stage_name}.every_rounds are above 0",
        )
    return query
