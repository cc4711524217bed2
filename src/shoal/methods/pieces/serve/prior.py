"""Predictions that are corrected by the client's class prior."""

from __future__ import annotations

from collections.abc import Mapping

from shoal import tree
from shoal.client.expert_mixture import corrected_predict
from shoal.client.gate import Gate
from shoal.client.prior import PRIOR, AdjustedTraining, EstimatePrior
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLASS_PRIOR,
    GLOBAL_MODEL,
    LABEL_DISTRIBUTIONS,
    SERVED_MODEL_PREDICTIONS,
)
from shoal.methods.composition.label_prior import count_labels, ensure_label_stage, has_label_stage, prior_pseudocount
from shoal.methods.composition.piece import Piece, register
from shoal.stages.training_prior import TrackTrainingPrior, training_priors
from shoal.types import ClientId, Params, ServerState


@register("serve", "prior")
class ClassPrior(Piece):
    """Corrects logits by the client's class prior, which an unseen client estimates from its inputs (EM)."""

    source = "Saerens et al. 2002"
    requires = (GLOBAL_MODEL, SERVED_MODEL_PREDICTIONS)
    requires_reason = "it corrects the predictions of the global model"
    uses = (LABEL_DISTRIBUTIONS,)
    provides = (CLASS_PRIOR,)
    client_keeps = (
        "its label counts or its estimate of them, and the training prior where label distributions are reported"
    )

    def add_to(self, method: MethodBuilder) -> None:
        count_labels(method)
        if has_label_stage(method):
            adjusted = method.training if isinstance(method.training, AdjustedTraining) else None
            method.server_updates.append(
                TrackTrainingPrior(adjusted.uniform_mix if adjusted else 1.0, ensure_label_stage(method))
            )
        model, served = method.setting.model, method.serving_models_for

        def models_to_serve(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
            models, priors = served(state, client), training_priors(state)
            return tree.to_device(
                {**models, **({PRIOR: {k: priors[k] for k in models}} if priors else {})}, model.device
            )

        method.models_to_serve = models_to_serve
        method.predict = corrected_predict(model, method.gate or Gate(), prior_pseudocount(method))
        method.adaptation_program = method.setting.make("estimate", EstimatePrior, model=model)
