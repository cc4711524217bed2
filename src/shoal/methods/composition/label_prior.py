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

PRIOR = "prior"
LABELS = "labels"  # the stage in which label distributions are reported where the representation is another one


@dataclass(frozen=True)
class PriorSmoothing(HasOptions):
    """How a client's class prior is smoothed."""

    group: ClassVar[str] = "serve"
    alpha: float = option(
        0.1, "Pseudocount of the class prior: samples of every class that are added to a client's label counts.", gt=0
    )


def alpha(method: MethodBuilder) -> float:
    return method.setting.make("serve", PriorSmoothing).alpha


def count_labels(method: MethodBuilder) -> None:
    """Every client counts its labels for itself. Nothing of the counts leaves the client."""
    if not any(stage.name == PRIOR for stage in method.stages["represent"]):
        counting = CountLabels(method.setting.model.num_classes, method.setting.model.device)
        method.stages["represent"].append(method.setting.make(PRIOR, QueryClients, program=counting, name=PRIOR))


def has_label_stage(method: MethodBuilder) -> bool:
    """Whether clients report label distributions in some stage that was added so far."""
    return method.provides(LABEL_DISTRIBUTIONS) or any(stage.name == LABELS for stage in method.stages["represent"])


def label_stage(method: MethodBuilder) -> str:
    """The stage in which clients report their label distributions. It is added if there is none yet."""
    if method.provides(LABEL_DISTRIBUTIONS):
        return REPRESENT_STAGE
    if not has_label_stage(method):
        split = method.training.split if method.training else "train"
        method.stages["represent"].append(label_query(method.setting, LABELS, split))
    return LABELS


def label_distributions(method: MethodBuilder) -> ClientColumn:
    """The label distributions of clients, which they report once, whether or not another piece asks for them too."""
    return ClientColumn("labels", label_stage(method))


def label_query(setting: Setting, name: str, split: str = "train") -> QueryClients:
    """A stage in which clients report their label distributions."""
    program = setting.make(name, LabelHistogram, classes=setting.model.num_classes, split=split, name=name)
    query = setting.make(name, QueryClients, program=program, name=name)
    if not query.every_rounds:  # a client releases its label distribution once
        setting.without_effect(name, "anew", unless=f"{name}.gamma and {name}.every are above 0")
    return query
