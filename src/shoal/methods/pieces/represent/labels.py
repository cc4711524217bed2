"""Label distributions, as in SimClust and RepClust."""

from __future__ import annotations

from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.methods.composition.capability import CLIENT_VECTORS, LABEL_DISTRIBUTIONS, VECTORS_BEFORE_TRAINING
from shoal.methods.composition.label_prior import label_query
from shoal.methods.composition.piece import Piece, register
from shoal.stages.balanced import REPRESENT_STAGE


@register("represent", "labels")
class LabelDistributions(Piece):
    """Lets every client report the label distribution of its training samples."""

    source = "Pereira et al. (SimClust and RepClust), Sec. III and Eq. 4"
    provides = (LABEL_DISTRIBUTIONS, CLIENT_VECTORS, VECTORS_BEFORE_TRAINING)
    must_be_used = (LABEL_DISTRIBUTIONS, CLIENT_VECTORS)
    client_sends = "its label distribution, with noise if represent.noise_scale is above 0"
    server_learns = "the label distribution of every client and its number of samples"

    def add_to(self, method: MethodBuilder) -> None:
        method.stages["represent"].append(label_query(method.setting, REPRESENT_STAGE))
        method.representation = ClientColumn("labels")
