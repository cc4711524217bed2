"""Computes the predictions of the served models, and turns them into the JSON of a response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor

from shoal.serve.inputs import InvalidInput
from shoal.types import Method, Params, Tree


class Predictions(NamedTuple):
    """The predictions of some samples, with the model of each."""

    probabilities: Tensor  # samples x classes
    experts: Sequence[str | None]  # the model that predicted each sample, by name
    routing_confidences: Sequence[float | None]  # of the rule that chose the model

    def slice_rows(self, rows: slice) -> Predictions:
        """Returns the predictions of a part of the samples."""
        return Predictions(self.probabilities[rows], self.experts[rows], self.routing_confidences[rows])


@dataclass(frozen=True, eq=False)
class ServedModels:
    """The models that predict for one caller."""

    models: Mapping[str, Params]
    expert: str | None = None  # the name of the expert if the caller is served exactly one

    @property
    def key(self) -> tuple[int, ...]:
        """The identity of the models: callers with the same key share a batch."""
        return tuple(id(model) for model in self.models.values())


def predict_rows(method: Method, served_models: ServedModels, x: Tensor, private: Tree | None = None) -> Predictions:
    """Returns the predictions of prepared samples, by the same function of the method that a run evaluates.

    It is `predict_routed` if the method has it, else `predict`.
    """
    private = {} if private is None else private
    if method.predict_routed is None:
        return to_predictions(served_models, method.predict(served_models.models, private, x))
    return to_predictions(served_models, *method.predict_routed(served_models.models, private, x))


def to_predictions(
    served_models: ServedModels,
    logits: Tensor,
    model_indices: Tensor | None = None,
    routing_confidence: Tensor | None = None,
) -> Predictions:
    """Returns predictions from logits. `model_indices` says which model predicted each sample."""
    num_samples, names = len(logits), sorted(served_models.models)
    if model_indices is None or served_models.expert is not None:  # a client's expert may be sent under another name
        experts: list[str | None] = [served_models.expert] * num_samples
    else:
        experts = [names[k] for k in model_indices.tolist()]
    return Predictions(
        logits.float().softmax(-1),
        experts,
        [None] * num_samples if routing_confidence is None else routing_confidence.tolist(),
    )


def compute_etag(data: bytes) -> str:
    """Returns the ETag of a response body."""
    return f'"{sha256(data).hexdigest()[:32]}"'


def response_rows(predictions: Predictions, classes: Sequence[str], abstain_below: float) -> list[dict[str, Any]]:
    """Returns one JSON object per sample. It has no label if the confidence is below the threshold."""
    best, class_indices = predictions.probabilities.max(1)
    if not all(map(math.isfinite, best.tolist())):
        raise InvalidInput(
            "samples", "samples has values that are so far from the training data that the model has no finite output."
        )
    columns = (
        best.tolist(),
        class_indices.tolist(),
        predictions.probabilities.tolist(),
        predictions.experts,
        predictions.routing_confidences,
    )
    return [
        {
            "label": None if confidence < abstain_below else classes[index],
            "abstained": confidence < abstain_below,
            "confidence": confidence,
            "probabilities": dict(zip(classes, probabilities, strict=True)),
            "expert": expert,
            "routing_confidence": score if score is None or math.isfinite(score) else None,
        }
        for confidence, index, probabilities, expert, score in zip(*columns, strict=True)
    ]
