"""Several models, of which the most confident one answers, row by row (FedClusterEnsemble, paper 004, Alg. 3)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from shoal.models import Model
from shoal.types import HasOptions, OnlyIf, Params, Predict, RoutedPredict, RoutedPrediction, Tree, option

MAX_STACKED_SAMPLES = 256
IF_RULE_IS_DENSITY = OnlyIf("serve.rule is density", lambda serve: serve.rule == "density")
EXTRACTOR, ROUTER = "extractor", "router"  # what an unseen client is sent beside experts, and not one of them


@dataclass(frozen=True)
class Confidence(HasOptions):
    """How the models of an ensemble answer together.

    By confidence, the one model that is surest of a row answers: by its largest logit, its largest probability, its
    free energy (logsumexp of its logits), or by `density`: how likely the row is among those of the model's cluster,
    plus `trust` times the largest logit. For comparison all may answer: by the mean of their probabilities, or for the
    class that most of them choose. `mask` leaves out classes that nobody in a model's cluster holds: as the server
    reads off what the first round did to the biases, or as members tell. `width`, `shrink` and `ridge` are those of
    the densities: how many features, how much of a cluster's covariance is that of all, and what is added to its
    diagonal.
    """

    group: ClassVar[str] = "serve"
    rule: Literal["logit", "probability", "energy", "density", "average", "majority"] = option(
        "logit",
        "A client without a cluster uses the expert with the largest logit, the largest probability, the lowest free "
        "energy or the highest feature density of its sample. With average or majority all experts predict together.",
    )
    mask: Literal["none", "read", "told"] = option(
        "none",
        "Exclude classes that no client of an expert's cluster holds. The server infers them from the biases after the "
        "first round (read) or from label distributions that clients report (told).",
    )
    logit_weight: float = option(
        0.5, "Add this multiple of the largest logit to the log density.", ge=0, only_if=IF_RULE_IS_DENSITY
    )
    max_features: int = option(
        256,
        "Compute densities of at most this many feature channels. The channels of the last ReLU layer are always used.",
        ge=1,
        only_if=IF_RULE_IS_DENSITY,
    )
    covariance_shrinkage: float = option(
        0.8,
        "Mix this fraction of the covariance within all clusters into that of each cluster for the density.",
        ge=0,
        le=1,
        only_if=IF_RULE_IS_DENSITY,
    )
    ridge: float = option(
        0.001,
        "Add this fraction of the mean variance to the diagonal of each covariance, which keeps the density finite.",
        gt=0,
        only_if=IF_RULE_IS_DENSITY,
    )

    def combine(self, logits: Tensor, densities: Tensor | None = None) -> RoutedPrediction:
        """Of logits [models, rows, classes], and log densities [models, rows] where there are any."""
        if self.rule in ("average", "majority"):
            return self._combine_all(logits)
        confidence = self.scores(logits)
        if densities is not None:
            confidence = (densities + self.logit_weight * confidence).log_softmax(0).exp()
        model_index = confidence.argmax(0)  # Alg. 3, line 8
        return RoutedPrediction(
            _logits_of_chosen_model(logits, model_index), model_index, confidence.amax(0)
        )  # line 10

    def scores(self, logits: Tensor) -> Tensor:
        """[models, rows]: how sure each model is of each row, by its logits."""
        match self.rule:
            case "probability":
                return logits.softmax(-1).amax(-1)
            case "energy":
                return logits.logsumexp(-1)
        return logits.amax(-1)

    def _combine_all(self, logits: Tensor) -> RoutedPrediction:
        """Named as the one who answered is the model that is surest of the class that all of them chose."""
        p = logits.softmax(-1)
        mean, votes = p.mean(0), F.one_hot(p.argmax(-1), p.shape[-1]).to(p).mean(0)
        probabilities = (
            mean if self.rule == "average" else (votes + 1e-3 * mean) / 1.001
        )  # of equal votes the larger mean
        chosen = probabilities.argmax(-1)
        model_index = p.gather(-1, chosen.expand(len(p), -1)[..., None]).squeeze(-1).argmax(0)
        return RoutedPrediction(probabilities.clamp(min=1e-12).log(), model_index, probabilities.amax(-1))


def _logits_of_chosen_model(logits: Tensor, model_index: Tensor) -> Tensor:
    index = model_index[None, :, None].expand(1, -1, logits.shape[-1])
    return logits.gather(0, index).squeeze(0)


def ensemble_logits(model: Model, models: Mapping[str, Params], x: Tensor) -> Tensor:
    """Logits [models, rows, classes], by sorted names. Few rows of dense networks pass all models at once; with many,
    or with convolutions, one model after the other is faster on a CPU."""
    names = sorted(models)
    if len(names) > 1 and len(x) <= MAX_STACKED_SAMPLES and not model.uses(nn.modules.conv._ConvNd):
        stack = {k: torch.stack([models[n][k] for n in names]) for k in models[names[0]]}
        with suppress(RuntimeError):  # a layer of the user's that torch cannot stack, such as a GRU
            return vmap(model.predict, in_dims=(0, None))(stack, x)
    return torch.stack([model.predict(models[n], x) for n in names])


def mask_absent_classes(logits: Tensor, is_present: Tensor) -> Tensor:
    """Classes that a model's cluster does not hold [models, classes] are the least likely by far."""
    return torch.where(is_present[:, None], logits, logits.amin(-1, keepdim=True) - 10)


def fit_discriminant(moments: Params, shrinkage: float, ridge: float) -> Params:
    """For each cluster a Gaussian around every class that it holds, all of one covariance: what `log_densities` needs.

    A cluster's covariance is that within its classes, mixed with that within the classes of all clusters. From moments
    [models, ...]: rows of each class, sums of features and of their products, both divided by the cluster's rows.
    """
    count, mean, square = (moments[k].double() for k in ("count", "mean", "square"))
    rows = count.sum(1).clamp(min=1)
    share = count / rows[:, None]  # [models, classes]
    centre = mean / share.clamp(min=1e-12)[..., None]  # [models, classes, features]
    within = square - torch.einsum("mc,mcd,mce->mde", share, centre, centre)
    mixed = (1 - shrinkage) * within + shrinkage * torch.einsum("m,mde->de", rows / rows.sum(), within)
    scale = mixed.diagonal(dim1=1, dim2=2).mean(1)
    eye = torch.eye(mixed.shape[1], dtype=mixed.dtype)
    covariance = mixed + (ridge * scale).clamp(min=1e-6)[:, None, None] * eye  # rows that are all alike have no spread
    root = torch.linalg.cholesky(covariance)
    whiten = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)  # its rows make features independent
    router = {
        "held": count > 0,
        "centre": torch.einsum("mde,mce->mcd", whiten, centre),
        "whiten": whiten,
        "volume": root.diagonal(dim1=1, dim2=2).log().sum(1),
    }
    return {k: x.float() if x.is_floating_point() else x for k, x in router.items()}


def log_densities(router: Params, features: Tensor) -> Tensor:
    """[models, rows], but for what all have in common; every class of every cluster is equally likely."""
    white = torch.einsum("mde,ne->mnd", router["whiten"], features)
    far = torch.cdist(white, router["centre"]).square()  # [models, rows, classes]
    far = far.masked_fill(~router["held"][:, None], torch.inf)
    return (-far / 2).logsumexp(-1) - router["volume"][:, None]


def ensemble_route(model: Model, confidence: Confidence) -> RoutedPredict:
    """Whoever is sent one model is answered by it; otherwise by confidence."""

    def route(models: Mapping[str, Params], private: Tree, x: Tensor) -> RoutedPrediction:
        logits = ensemble_logits(model, {k: m for k, m in models.items() if k not in (EXTRACTOR, ROUTER)}, x)
        router, densities = models.get(ROUTER, {}), None
        if EXTRACTOR in models:
            densities = log_densities(router, model.features(models[EXTRACTOR], x, confidence.max_features))
        if "mask" in router:
            logits = mask_absent_classes(logits, router["mask"])
        return confidence.combine(logits, densities)

    return route


def ensemble_predict(model: Model, confidence: Confidence) -> Predict:
    route = ensemble_route(model, confidence)

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return route(models, private, x).logits

    return predict
