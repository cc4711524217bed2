"""Fine-tuning of the serving model."""

from __future__ import annotations

from shoal.methods.composition import tuning
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import ONE_MODEL_PER_CLIENT, PERSONAL_MODEL
from shoal.methods.composition.model_functions import personal_model_predict
from shoal.methods.composition.piece import Piece, register


@register("personalise", "fine-tune")
class FineTune(Piece):
    """Lets every client train its serving model a little further and keep the result."""

    source = "common baseline"
    requires = (ONE_MODEL_PER_CLIENT,)
    requires_reason = "fine-tuning starts from one model"
    provides = (PERSONAL_MODEL,)
    client_keeps = "the model that it trained further"

    def add_to(self, method: MethodBuilder) -> None:
        method.personalisation.append(lambda served: tuning.fine_tuning_stages(method.setting, served))
        method.predict = personal_model_predict(method.setting.model, method.predict)
