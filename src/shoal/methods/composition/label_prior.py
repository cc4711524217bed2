"""Label distributions at the server, and label counts at the clients, for the pieces that use them."""

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
    """How a client's class prior is smoothed."""

    group: ClassVar[str] = "serve"
    pseudocount: float = option(
        0.1, "Pseudocount of the class prior: samples of every class that are added to a client's label counts.", gt=0
    )


def prior_pseudocount(method: MethodBuilder) -> float:
    return method.setting.make("serve", PriorSmoothing).pseudocount


def count_labels(method: MethodBuilder) -> None:
    """Every client counts its labels for itself. Nothing of the counts leaves the client."""
    if not any(stage.name == PRIOR_STAGE for stage in method.stages["represent"]):
        counting = CountLabels(method.setting.model.num_classes, method.setting.model.device)
        method.stages["represent"].append(
            method.setting.make(PRIOR_STAGE, QueryClients, program=counting, group=PRIOR_STAGE)
        )


def has_label_stage(method: MethodBuilder) -> bool:
    """Whether clients report label distributions in some stage that was added so far."""
    return method.provides(LABEL_DISTRIBUTIONS) or any(
        stage.name == LABEL_STAGE for stage in method.stages["represent"]
    )


def ensure_label_stage(method: MethodBuilder) -> str:
    """The stage in which clients report their label distributions. It is added if there is none yet."""
    if method.provides(LABEL_DISTRIBUTIONS):
        return REPRESENT_STAGE
    if not has_label_stage(method):
        split = method.training.split if method.training else "train"
        method.stages["represent"].append(label_query(method.setting, LABEL_STAGE, split))
    return LABEL_STAGE


def label_distributions(method: MethodBuilder) -> ClientColumn:
    """The label distributions of clients, which they report once, whether or not another piece asks for them too."""
    return ClientColumn("labels", ensure_label_stage(method))


def label_query(setting: Setting, stage_name: str, split: str = "train") -> QueryClients:
    """A stage in which clients report their label distributions."""
    program = setting.make(stage_name, LabelHistogram, classes=setting.model.num_classes, split=split, group=stage_name)
    query = setting.make(stage_name, QueryClients, program=program, group=stage_name)
    if not query.every_rounds:  # a client releases its label distribution once
        setting.mark_without_effect(stage_name, "anew", unless=f"{stage_name}.gamma and {stage_name}.every are above 0")
    return query
