"""What models say to rows, and how it is put to whoever asked."""

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
    probabilities: Tensor  # rows x classes
    experts: Sequence[str | None]  # which model answered each row
    routing_confidences: Sequence[float | None]  # how sure the rule was that chose it

    def slice_rows(self, rows: slice) -> Predictions:
        return Predictions(self.probabilities[rows], self.experts[rows], self.routing_confidences[rows])


@dataclass(frozen=True, eq=False)
class ServedModels:
    """The models that one caller is served."""

    models: Mapping[str, Params]
    expert: str | None = None  # the group's whose model it is, where there is one

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(id(model) for model in self.models.values())


def predict_rows(method: Method, served_models: ServedModels, x: Tensor, private: Tree | None = None) -> Predictions:
    """By `route` where the method has one, else by `predict`: exactly what a run evaluates."""
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
    rows, names = len(logits), sorted(served_models.models)
    if (
        model_indices is None or served_models.expert is not None
    ):  # a client's own is named by its group, whatever it is sent as
        experts: list[str | None] = [served_models.expert] * rows
    else:
        experts = [names[k] for k in model_indices.tolist()]
    return Predictions(
        logits.float().softmax(-1),
        experts,
        [None] * rows if routing_confidence is None else routing_confidence.tolist(),
    )


def compute_etag(data: bytes) -> str:
    return f'"{sha256(data).hexdigest()[:32]}"'


def response_rows(predictions: Predictions, classes: Sequence[str], abstain_below: float) -> list[dict[str, Any]]:
    """One object for each row; without a label where the confidence is below the threshold."""
    best, class_indices = predictions.probabilities.max(1)
    if not all(map(math.isfinite, best.tolist())):
        raise InvalidInput(
            "rows", "rows: values are so far from those that the model was trained on that it has no answer"
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
            "label": None if confidence < abstain_below else classes[place],
            "abstained": confidence < abstain_below,
            "confidence": confidence,
            "probabilities": dict(zip(classes, row, strict=True)),
            "expert": expert,
            "score": score if score is None or math.isfinite(score) else None,
        }
        for confidence, place, row, expert, score in zip(*columns, strict=True)
    ]
