"""The conditional update, as in APCSMA."""

from __future__ import annotations

from dataclasses import replace

from shoal.client.conditional_update import ConditionalUpdate
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    INDIVIDUAL_UPDATES,
    ONE_MODEL,
    PERSONAL_MODEL,
    PERSONAL_TRAINING,
    TRAINING_METRICS,
)
from shoal.methods.composition.model_functions import personal_model_predict
from shoal.methods.composition.piece import Piece, register
from shoal.stages.contribution import Kappa, UpdatePersonalModels


@register("personalise", "update")
class ConditionalUpdates(Piece):
    """Lets every client keep a personal model, and mix the global model into it if the personal model is better."""

    source = "APCSMA, Eq. 16, Alg. 3"
    requires = (ONE_MODEL, TRAINING_METRICS, INDIVIDUAL_UPDATES)
    uses = (PERSONAL_TRAINING,)
    provides = (PERSONAL_MODEL,)
    client_keeps = (
        "a personal model, which is the received one, or a mixture if the personal one is better on validation samples"
    )

    def add_to(self, method: MethodBuilder) -> None:
        setting, training = method.setting, method.ensure_set(method.training, "training")
        method.training = method.program = replace(training, start="own", keeps_model=True)
        program = setting.make("update", ConditionalUpdate, model=setting.model, sensitivity=training.sensitivity)
        kappa = setting.make("update", Kappa, rounds=setting.rounds)
        method.stages["personalise"].append(UpdatePersonalModels(program, method.models_to_train, kappa))
        method.predict = personal_model_predict(setting.model, method.predict)
