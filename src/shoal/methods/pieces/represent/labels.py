"""Label distributions, as SimClust and RepClust use them."""

from __future__ import annotations

from shoal.client.histogram import LabelHistogram
from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.methods.composition.capability import CLIENT_VECTORS, LABEL_DISTRIBUTIONS, VECTORS_BEFORE_TRAINING
from shoal.methods.composition.piece import Piece, register
from shoal.stages.query import AskOnce


@register("represent", "labels")
class LabelDistributions(Piece):
    """Every client reports how often each class occurs in its training samples."""

    source = "Pereira et al. (SimClust and RepClust), Sec. III and Eq. 4"
    provides = (LABEL_DISTRIBUTIONS, CLIENT_VECTORS, VECTORS_BEFORE_TRAINING)
    must_be_used = (LABEL_DISTRIBUTIONS, CLIENT_VECTORS)
    client_sends = "its label distribution, with noise if represent.gamma is set"
    server_learns = "the label distribution of every client and its number of samples"

    def add_to(self, method: MethodBuilder) -> None:
        setting = method.setting
        program = setting.make("represent", LabelHistogram, classes=setting.model.classes)
        method.stages["represent"].append(setting.make("represent", AskOnce, program=program))
        method.representation = ClientColumn("labels")
