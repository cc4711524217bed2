"""What models say to rows, and how it is put to whoever asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from torch import Tensor

from shoal.serve.inputs import Unfit
from shoal.types import Method, Params, Tree


class Answered(NamedTuple):
    probabilities: Tensor  # rows x classes
    experts: Sequence[str | None]  # which model answered each row
    scores: Sequence[float | None]  # how sure the rule was that chose it

    def part(self, rows: slice) -> Answered:
        return Answered(self.probabilities[rows], self.experts[rows], self.scores[rows])


@dataclass(frozen=True, eq=False)
class Lot:
    """The models that one caller is served."""

    models: Mapping[str, Params]
    expert: str | None = None  # the group's whose model it is, where there is one

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(id(model) for model in self.models.values())


def answered(method: Method, lot: Lot, x: Tensor, private: Tree | None = None) -> Answered:
    """By `route` where the method has one, else by `predict`: exactly what a run evaluates."""
    private = {} if private is None else private
    if method.predict_routed is None:
        return worded(lot, method.predict(lot.models, private, x))
    return worded(lot, *method.predict_routed(lot.models, private, x))


def worded(lot: Lot, logits: Tensor, expert: Tensor | None = None, score: Tensor | None = None) -> Answered:
    rows, names = len(logits), sorted(lot.models)
    if expert is None or lot.expert is not None:  # a client's own is named by its group, whatever it is sent as
        experts: list[str | None] = [lot.expert] * rows
    else:
        experts = [names[k] for k in expert.tolist()]
    return Answered(logits.float().softmax(-1), experts, [None] * rows if score is None else score.tolist())


def etag_of(data: bytes) -> str:
    return f'"{sha256(data).hexdigest()[:32]}"'


def rows_of(said: Answered, classes: Sequence[str], below: float) -> list[dict[str, Any]]:
    """One object for each row; without a label where the confidence is below the threshold."""
    best, places = said.probabilities.max(1)
    if not all(map(math.isfinite, best.tolist())):
        raise Unfit("rows", "rows: values are so far from those that the model was trained on that it has no answer")
    columns = (best.tolist(), places.tolist(), said.probabilities.tolist(), said.experts, said.scores)
    return [
        {
            "label": None if confidence < below else classes[place],
            "abstained": confidence < below,
            "confidence": confidence,
            "probabilities": dict(zip(classes, row, strict=True)),
            "expert": expert,
            "score": score if score is None or math.isfinite(score) else None,
        }
        for confidence, place, row, expert, score in zip(*columns, strict=True)
    ]
