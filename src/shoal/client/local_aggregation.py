"""Between a client's own model and the received one, number by number: where training starts (FedALA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from shoal.client.train import LocalTraining, cross_entropy
from shoal.errors import UserError
from shoal.models import Model
from shoal.types import Batch, HasOptions, OnlyIf, Params, Phase, Predict, Report, Task, Tree, option

IF_WEIGHTS_ARE_LEARNED = OnlyIf(
    "ala.epochs or ala.first_epochs is above 0", lambda ala: ala.epochs > 0 or ala.first_epochs > 0
)


@dataclass(frozen=True)
class LocalAggregation(HasOptions):
    """A weight from 0 (own) to 1 (received) for every number of the last `layers` layers, learned on a share of the
    client's rows; all below is as received. Weights are at first 1, and go on from task to task."""

    model: Model
    group: ClassVar[str] = "ala"
    layers: int = option(
        1,
        "Learn aggregation weights for this many layers, counted from the last. All layers below are taken from the "
        "received model.",
        ge=1,
    )
    sample_fraction: float = option(
        0.8,
        "Learn the aggregation weights on this fraction of the client's samples, drawn at random.",
        gt=0,
        le=1,
        only_if=IF_WEIGHTS_ARE_LEARNED,
    )
    lr: float = option(
        1.0,
        "Multiply the gradient of the aggregation weights by this learning rate in each step.",
        gt=0,
        only_if=IF_WEIGHTS_ARE_LEARNED,
    )
    epochs: int = option(1, "Update the aggregation weights for this many epochs before each local training.", ge=0)
    first_epochs: int = option(
        10,
        "Train the aggregation weights for this many extra epochs when a client takes part for the second time. "
        "0 leaves the extra epochs out.",
        ge=0,
    )
    batch_size: int = option(
        32, "Each step on the aggregation weights uses this many samples.", ge=1, only_if=IF_WEIGHTS_ARE_LEARNED
    )
    split: str = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = len(self.model.layers)
        if self.layers > most:
            raise UserError(
                f"ala.layers is {self.layers}; it must be from 1 to {most}, the layers of {self.model.name}"
            )

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(k for layer in self.model.layers[-self.layers :] for k in layer)

    @property
    def phase(self) -> Phase:
        return Phase(self.split, self.epochs, self.batch_size, self.step, sample_fraction=self.sample_fraction)

    def begin(self, received: Params, private: Tree) -> Tree:
        """Who has no model of its own has the received one: then weights change nothing, and are not changed."""
        own = private.get("model", received)
        weights = private.get("weights") or {k: torch.ones_like(received[k]) for k in self.param_names}
        return {
            "own": {k: own[k] for k in self.param_names},
            "received": {k: received[k] for k in self.param_names},
            "below": {k: v for k, v in received.items() if k not in weights},
            "weights": weights,
        }

    def objective(self, weights: Params, state: Tree, batch: Batch) -> Tensor:
        model = state["below"] | interpolate(state["own"], state["received"], weights)
        logits, _ = self.model.forward(model, batch.x, batch.key)
        return cross_entropy(logits, batch) / batch.w.sum().clamp(min=1)

    def step(self, state: Tree, batch: Batch) -> Tree:
        gradients = grad(self.objective)(state["weights"], state, batch)
        return state | {"weights": {k: (w - self.lr * gradients[k]).clamp(0, 1) for k, w in state["weights"].items()}}

    def initial_model(self, state: Tree) -> Params:
        return dict(sorted((state["below"] | interpolate(state["own"], state["received"], state["weights"])).items()))


def interpolate(own: Params, received: Params, weights: Params) -> Params:
    return {k: torch.lerp(own[k], received[k], w) for k, w in weights.items()}


@dataclass(frozen=True)
class LearnAggregationWeights:
    """The weights alone, of a client that has a model of its own; the report says whether it has."""

    aggregation: LocalAggregation
    name: str = "ala"

    @property
    def batchable(self) -> bool:
        return self.aggregation.model.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self.aggregation.phase,)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        return self.aggregation.begin(received, private) | {"model": private.get("model", {})}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report = Report(metrics={"done": (float(bool(state["model"])), 1.0)})
        return report, {"model": state["model"], "weights": state["weights"]} if state["model"] else None


@dataclass(frozen=True)
class AggregateAndTrain:
    """The received model enters the client's own, which is trained from there, sent, and kept with the weights."""

    aggregation: LocalAggregation
    training: LocalTraining
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (replace(self.aggregation.phase, on_end=self.start_training), *self.training.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        (received,) = task.models.values()
        return self.training.begin(task, private) | self.aggregation.begin(received, private)

    def start_training(self, state: Tree) -> Tree:
        kept = {k: state[k] for k in ("lr", "loss", "weights")}
        return kept | self.training.start_at(
            self.aggregation.initial_model(state), anchor=state["below"] | state["received"]
        )

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training.end(task, state, counts)
        return report, {"model": self.training.current_model(state), "weights": state["weights"]}


def aggregated_predict(aggregation: LocalAggregation) -> Predict:
    """The newest global model in the client's own, by the weights that it learned last."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        state = aggregation.begin(models["global"], private)
        return aggregation.model.predict(aggregation.initial_model(state), x)

    return predict
