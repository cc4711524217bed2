"""Selection of the clients with the largest contributions, as in APCSMA."""

from __future__ import annotations

from dataclasses import replace

from shoal.client.training_metrics import MeasureAccuracy
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import INDIVIDUAL_UPDATES, ONE_MODEL, PERSONAL_TRAINING, TRAINING_METRICS
from shoal.methods.composition.coefficients import get_coefficients
from shoal.methods.composition.piece import Piece, register
from shoal.stages.contribution import MEASURE_STAGE, SelectByContribution
from shoal.stages.query import QueryClients


@register("select", "contribution")
class LargestContributions(Piece):
    """Selects the clients with the largest value of the contribution function F1."""

    source = "APCSMA, Eq. 1-11, Alg. 1"
    requires = (ONE_MODEL, TRAINING_METRICS, INDIVIDUAL_UPDATES)
    client_sends = "accuracy and loss on its own samples after training"
    server_learns = (
        "the accuracy and loss of each client's model and its number of samples; the server keeps the last model"
    )

    def add_to(self, method: MethodBuilder) -> None:
        setting = method.setting
        select = setting.make("select", SelectByContribution, coefficients=get_coefficients(method))
        is_fresh, is_cold = select.metrics == "fresh", select.start == "cold"
        if is_fresh or is_cold:
            program = MeasureAccuracy(setting.model, method.ensure_set(method.training, "training").split)
            query = QueryClients(
                program,
                method.models_to_train,
                every_rounds=int(is_fresh),
                first_round=int(not is_cold),
                name=MEASURE_STAGE,
            )
            method.stages["select"].append(replace(query, cache_models=method.uses(PERSONAL_TRAINING)))
        method.stages["select"].append(select)
