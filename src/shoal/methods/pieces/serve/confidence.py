"""Prediction with the most confident cluster model, as in FedClusterEnsemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.client.confidence import Confidence, ensemble_predict, ensemble_route
from shoal.client.feature_moments import ComputeFeatureMoments
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLUSTER_MODELS,
    FIRST_ROUND_MODELS,
    LABEL_DISTRIBUTIONS,
    PERSONAL_MODEL,
)
from shoal.methods.composition.label_prior import ensure_label_stage
from shoal.methods.composition.model_functions import one_model_init
from shoal.methods.composition.piece import Piece, register
from shoal.stages.feature_moments import LABEL_STAGE, CollectFeatureMoments, confident_models
from shoal.stages.first_round_clusters import KeepFirstMean
from shoal.types import Params, Predict, ServerState, Tree


@register("serve", "confidence")
class MostConfident(Piece):
    """Serves a client without a cluster all cluster models, of which the most confident one predicts."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 3"
    requires = (CLUSTER_MODELS,)
    requires_reason = "without clusters there is one model only"
    uses = (FIRST_ROUND_MODELS, LABEL_DISTRIBUTIONS)
    client_sends = "nothing; with serve.rule=density, sums of features and of their products over its samples"
    client_keeps = "the models of all clusters, on an unseen client"
    server_learns = "with serve.mask=reported, the label distribution of every client"

    def add_to(self, method: MethodBuilder) -> None:
        setting = method.setting
        rule = setting.make("serve", Confidence)
        uses_density = rule.rule == "density"
        if uses_density or rule.mask == "inferred":
            field = "rule is 'density'" if uses_density else "mask is 'inferred'"
            method.require(self, FIRST_ROUND_MODELS, f"serve.{field}")
        if uses_density:
            split = method.ensure_set(method.training, "training").split
            method.stages["serve"].append(
                CollectFeatureMoments(ComputeFeatureMoments(setting.model, rule.max_features, split))
            )
            method.observers.append(KeepFirstMean())
            method.init = _init_that_checks_features(method, rule)
        labels = ensure_label_stage(method) if rule.mask == "reported" else LABEL_STAGE
        ensemble_predictor = ensemble_predict(setting.model, rule)
        personal_predict = method.predict if method.provides(PERSONAL_MODEL) else None
        method.serve_unassigned_clients = lambda served: confident_models(setting.model, rule, labels)
        method.predict_routed = ensemble_route(setting.model, rule)
        method.predict = (
            ensemble_predictor
            if personal_predict is None
            else _personal_or_shared_predict(personal_predict, ensemble_predictor)
        )


def _init_that_checks_features(method: MethodBuilder, rule: Confidence) -> Callable[[int], ServerState]:
    """Returns an `init` that refuses a network without suitable features before any client is queried."""
    model, first = method.setting.model, method.init or one_model_init(method.setting.model)

    def init(seed: int) -> ServerState:
        state = first(seed)
        params = next(iter(state.models.values()))
        model.features(params, torch.zeros(2, *model.input_shape, device=model.device), rule.max_features)
        return state

    return init


def _personal_or_shared_predict(personal: Predict, shared: Predict) -> Predict:
    """Returns a function that predicts with the personal model, or with the cluster models on a client without one."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return (personal if "model" in private else shared)(models, private, x)

    return predict
