"""The conditional update, as APCSMA personalises."""

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
    """Every client keeps a model of its own and mixes the global model into it where that one is worse."""

    source = "APCSMA, Eq. 16, Alg. 3"
    requires = (ONE_MODEL, TRAINING_METRICS, INDIVIDUAL_UPDATES)
    uses = (PERSONAL_TRAINING,)
    provides = (PERSONAL_MODEL,)
    client_keeps = "a model of its own, mixed with the received one where that is worse on its validation samples"

    def add_to(self, method: MethodBuilder) -> None:
        setting, training = method.setting, method.ensure_set(method.training, "training")
        method.training = method.program = replace(training, start="own", keeps_model=True)
        program = setting.make("update", ConditionalUpdate, model=setting.model, rows=training.sensitivity)
        kappa = setting.make("update", Kappa, rounds=setting.rounds)
        method.stages["personalise"].append(UpdatePersonalModels(program, method.models_to_train, kappa))
        method.predict = personal_model_predict(setting.model, method.predict)
