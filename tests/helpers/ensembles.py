"""A method whose models all answer, and the surest of them counts: as a user would bring it."""

from dataclasses import replace

import torch

from shoal.methods.ifca import ifca
from shoal.stages.experts import expert_for
from shoal.types import RoutedPrediction


def ensemble(setting):
    def route(models, private, x):
        logits = torch.stack([setting.model.predict(models[name], x) for name in sorted(models)])
        sure = logits.softmax(-1).amax(-1)
        chosen = sure.argmax(0)
        return RoutedPrediction(logits[chosen, torch.arange(len(x))], chosen, sure.amax(0))

    return replace(
        ifca(setting),
        name="ensemble",
        models_for=lambda state, client: state.models if client is None else expert_for(state, client),
        predict=lambda models, private, x: route(models, private, x).logits,
        predict_routed=route,
    )
