"""Prediction by the most confident of several models, sample by sample (FedClusterEnsemble, Alg. 3)."""

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
EXTRACTOR, ROUTER = "extractor", "router"  # names of models that are sent beside experts but are no experts


@dataclass(frozen=True)
class Confidence(HasOptions):
    """Combines the predictions of several models into one.

    With most rules the most confident model predicts a sample. Its confidence is its largest logit, its largest
    probability, its negative free energy (logsumexp of its logits), or with `density` the log density of the sample in
    the model's cluster plus `logit_weight` times the largest logit. For comparison, all models may predict together by
    the mean of their probabilities (`average`) or by the class that most of them predict (`majority`).

    `mask` excludes classes that no client of a model's cluster has. `max_features`, `covariance_shrinkage` and `ridge`
    belong to the densities.
    """

    group: ClassVar[str] = "serve"
    rule: Literal["logit", "probability", "energy", "density", "average", "majority"] = option(
        "logit",
        "A client without a cluster uses the expert with the largest logit, the largest probability, the lowest free "
        "energy or the highest feature density of its sample. With average or majority all experts predict together.",
    )
    mask: Literal["none", "inferred", "reported"] = option(
        "none",
        "Exclude classes that no client of an expert's cluster has. The server infers them from the biases after the "
        "first round (inferred) or from label distributions that clients report (reported).",
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
        """Returns the prediction from logits [models, samples, classes] and, with densities, from [models, samples]."""
        if self.rule in ("average", "majority"):
            return self._combine_all(logits)
        confidence = self.scores(logits)
        if densities is not None:
            confidence = (densities + self.logit_weight * confidence).log_softmax(0).exp()
        model_index = confidence.argmax(0)  # Alg. 3, line 8
        chosen_logits = _logits_of_chosen_model(logits, model_index)  # line 10
        return RoutedPrediction(chosen_logits, model_index, confidence.amax(0))

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the confidence of each model about each sample, from logits alone: [models, samples]."""
        match self.rule:
            case "probability":
                return logits.softmax(-1).amax(-1)
            case "energy":
                return logits.logsumexp(-1)
        return logits.amax(-1)

    def _combine_all(self, logits: Tensor) -> RoutedPrediction:
        """Returns the joint prediction; its model index names the model with the largest probability of the class."""
        p = logits.softmax(-1)
        mean, votes = p.mean(0), F.one_hot(p.argmax(-1), p.shape[-1]).to(p).mean(0)
        # With equal votes the class with the larger mean probability is predicted.
        probabilities = mean if self.rule == "average" else (votes + 1e-3 * mean) / 1.001
        predicted = probabilities.argmax(-1)
        model_index = p.gather(-1, predicted.expand(len(p), -1)[..., None]).squeeze(-1).argmax(0)
        return RoutedPrediction(probabilities.clamp(min=1e-12).log(), model_index, probabilities.amax(-1))


def _logits_of_chosen_model(logits: Tensor, model_index: Tensor) -> Tensor:
    index = model_index[None, :, None].expand(1, -1, logits.shape[-1])
    return logits.gather(0, index).squeeze(0)


def ensemble_logits(model: Model, models: Mapping[str, Params], x: Tensor) -> Tensor:
    """Returns the logits of all models in the order of their names: [models, samples, classes].

    Stacked models are faster for few samples and dense networks. With many samples or with convolutions, one model
    after the other is faster on a CPU.
    """
    names = sorted(models)
    if len(names) > 1 and len(x) <= MAX_STACKED_SAMPLES and not model.uses(nn.modules.conv._ConvNd):
        stack = {k: torch.stack([models[n][k] for n in names]) for k in models[names[0]]}
        with suppress(RuntimeError):  # torch cannot stack some layers, such as a GRU
            return vmap(model.predict, in_dims=(0, None))(stack, x)
    return torch.stack([model.predict(models[n], x) for n in names])


def mask_absent_classes(logits: Tensor, is_present: Tensor) -> Tensor:
    """Returns logits in which a class that a model's cluster does not have is by far the least likely.

    `is_present` [models, classes] is True for the classes that a cluster has.
    """
    return torch.where(is_present[:, None], logits, logits.amin(-1, keepdim=True) - 10)


def fit_discriminant(moments: Params, shrinkage: float, ridge: float) -> Params:
    """Returns the router for `log_densities`: a Gaussian around every class of each cluster, with one covariance each.

    A cluster's covariance is the covariance within its classes, mixed with the covariance within the classes of all
    clusters. Moments [models, ...] are the number of samples of each class and the sums of features and of their
    products, both divided by the number of samples of the cluster.
    """
    count, mean, square = (moments[k].double() for k in ("count", "mean", "square"))
    num_samples = count.sum(1).clamp(min=1)
    fraction = count / num_samples[:, None]  # [models, classes]
    centre = mean / fraction.clamp(min=1e-12)[..., None]  # [models, classes, features]
    within = square - torch.einsum("mc,mcd,mce->mde", fraction, centre, centre)
    mixed = (1 - shrinkage) * within + shrinkage * torch.einsum("m,mde->de", num_samples / num_samples.sum(), within)
    scale = mixed.diagonal(dim1=1, dim2=2).mean(1)
    eye = torch.eye(mixed.shape[1], dtype=mixed.dtype)
    # Equal samples have variance 0, therefore the ridge has a lower bound.
    covariance = mixed + (ridge * scale).clamp(min=1e-6)[:, None, None] * eye
    root = torch.linalg.cholesky(covariance)
    whiten = torch.linalg.solve_triangular(root, eye.expand_as(root), upper=False)  # whitened features are independent
    router = {
        "held": count > 0,
        "centre": torch.einsum("mde,mce->mcd", whiten, centre),
        "whiten": whiten,
        "volume": root.diagonal(dim1=1, dim2=2).log().sum(1),
    }
    return {k: x.float() if x.is_floating_point() else x for k, x in router.items()}


def log_densities(router: Params, features: Tensor) -> Tensor:
    """Returns log densities [models, samples] up to a common constant. All classes of a cluster are equally likely."""
    whitened = torch.einsum("mde,ne->mnd", router["whiten"], features)
    squared_distance = torch.cdist(whitened, router["centre"]).square()  # [models, samples, classes]
    squared_distance = squared_distance.masked_fill(~router["held"][:, None], torch.inf)
    return (-squared_distance / 2).logsumexp(-1) - router["volume"][:, None]


def ensemble_route(model: Model, confidence: Confidence) -> RoutedPredict:
    """Returns the function that predicts with all received experts and names the model of each prediction."""

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
    """Returns the function that predicts logits with all received experts."""
    route = ensemble_route(model, confidence)

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return route(models, private, x).logits

    return predict
