"""A method of a user: for every sample, the prediction of the most confident model counts."""

from dataclasses import replace

import torch

from shoal.methods.ifca import ifca
from shoal.stages.experts import expert_for
from shoal.types import RoutedPrediction


def ensemble(setting):
    def route(models, private, x):
        logits = torch.stack([setting.model.predict(models[name], x) for name in sorted(models)])
        confidence = logits.softmax(-1).amax(-1)
        model_index = confidence.argmax(0)
        return RoutedPrediction(logits[model_index, torch.arange(len(x))], model_index, confidence.amax(0))

    return replace(
        ifca(setting),
        name="ensemble",
        models_for=lambda state, client: state.models if client is None else expert_for(state, client),
        predict=lambda models, private, x: route(models, private, x).logits,
        predict_routed=route,
    )
