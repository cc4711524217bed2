"""Several models, of which the most confident one answers, row by row (FedClusterEnsemble, paper 004, Alg. 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from shoal.models import Model
from shoal.types import Answer, Params, Tree

FEW_ROWS = 256

Rule = Literal["logit", "probability", "energy", "average", "majority"]


@dataclass(frozen=True)
class Confidence:
    """How the models of an ensemble answer together.

    By confidence, the one model that is surest of a row answers: by its largest logit, its largest probability, or its
    free energy, logsumexp of its logits. For comparison all may answer: the mean of their probabilities, or the class
    that most of them choose.
    """

    rule: Rule = "logit"

    def answer(self, logits: Tensor) -> Answer:
        """Of logits [models, rows, classes]."""
        if self.rule in ("average", "majority"):
            return self._together(logits)
        sure = self.scores(logits)
        chosen = sure.argmax(0)  # line 8
        return Answer(_picked(logits, chosen), chosen, sure.amax(0))  # line 10

    def scores(self, logits: Tensor) -> Tensor:
        """[models, rows]: how sure each model is of each row."""
        match self.rule:
            case "probability":
                return logits.softmax(-1).amax(-1)
            case "energy":
                return logits.logsumexp(-1)
        return logits.amax(-1)

    def _together(self, logits: Tensor) -> Answer:
        """Named as the one who answered is the model that is surest of the class that all of them chose."""
        p = logits.softmax(-1)
        mean = p.mean(0)
        votes = F.one_hot(p.argmax(-1), p.shape[-1]).to(p).mean(0)
        said = mean if self.rule == "average" else (votes + 1e-3 * mean) / 1.001  # of equal votes the larger mean
        chosen = said.argmax(-1)
        expert = p.gather(-1, chosen.expand(len(p), -1)[..., None]).squeeze(-1).argmax(0)
        return Answer(said.clamp(min=1e-12).log(), expert, said.amax(-1))


def _picked(logits: Tensor, chosen: Tensor) -> Tensor:
    place = chosen[None, :, None].expand(1, -1, logits.shape[-1])
    return logits.gather(0, place).squeeze(0)


def said_by(model: Model, models: Mapping[str, Params], x: Tensor) -> Tensor:
    """Logits [models, rows, classes], by sorted names. Few rows of dense networks pass all models at once; with many,
    or with convolutions, one model after the other is faster on a CPU."""
    names = sorted(models)
    if len(names) > 1 and len(x) <= FEW_ROWS and not model.uses(nn.modules.conv._ConvNd):
        stack = {k: torch.stack([models[n][k] for n in names]) for k in models[names[0]]}
        return vmap(model.predict, in_dims=(0, None))(stack, x)
    return torch.stack([model.predict(models[n], x) for n in names])
