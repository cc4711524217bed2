"""Training that starts between the personal and the received model, with a weight for each parameter (FedALA)."""

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
    "local_aggregation.epochs or local_aggregation.first_epochs is above 0",
    lambda aggregation: aggregation.epochs > 0 or aggregation.first_epochs > 0,
)


@dataclass(frozen=True)
class LocalAggregation(HasOptions):
    """Learns a weight from 0 (personal) to 1 (received) for every parameter of the last `layers` layers.

    The weights are learned on a fraction of the client's samples. They start at 1 and continue from task to task. All
    layers below are taken from the received model.
    """

    model: Model
    group: ClassVar[str] = "local_aggregation"
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
        "Train the aggregation weights for this many extra epochs when a client is in the cohort for the second time. "
        "0 leaves the extra epochs out.",
        ge=0,
    )
    batch_size: int = option(
        32, "Each step on the aggregation weights uses this many samples.", ge=1, only_if=IF_WEIGHTS_ARE_LEARNED
    )
    split: str = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        num_layers = len(self.model.layers)
        if self.layers > num_layers:
            raise UserError(
                f"local_aggregation.layers is {self.layers}; it must be from 1 to {num_layers}, the number of layers "
                f"of {self.model.name}"
            )

    @property
    def param_names(self) -> tuple[str, ...]:
        """The names of the parameters that have a weight."""
        return tuple(k for layer in self.model.layers[-self.layers :] for k in layer)

    @property
    def phase(self) -> Phase:
        """The phase that learns the weights."""
        return Phase(self.split, self.epochs, self.batch_size, self.step, sample_fraction=self.sample_fraction)

    def begin(self, received: Params, private: Tree) -> Tree:
        """Returns the state before the weights are learned.

        A client without a personal model uses the received one instead. Weights then have no effect and no gradient.
        """
        personal = private.get("model", received)
        weights = private.get("weights") or {k: torch.ones_like(received[k]) for k in self.param_names}
        return {
            "own": {k: personal[k] for k in self.param_names},
            "received": {k: received[k] for k in self.param_names},
            "below": {k: v for k, v in received.items() if k not in weights},
            "weights": weights,
        }

    def objective(self, weights: Params, state: Tree, batch: Batch) -> Tensor:
        """Returns the mean loss of the interpolated model on a batch."""
        model = state["below"] | interpolate(state["own"], state["received"], weights)
        logits, _ = self.model.forward(model, batch.x, batch.key)
        return cross_entropy(logits, batch) / batch.w.sum().clamp(min=1)

    def step(self, state: Tree, batch: Batch) -> Tree:
        """Returns the state after one gradient step on the weights."""
        gradients = grad(self.objective)(state["weights"], state, batch)
        return state | {"weights": {k: (w - self.lr * gradients[k]).clamp(0, 1) for k, w in state["weights"].items()}}

    def initial_model(self, state: Tree) -> Params:
        """Returns the interpolated model from which training starts."""
        return dict(sorted((state["below"] | interpolate(state["own"], state["received"], state["weights"])).items()))


def interpolate(own: Params, received: Params, weights: Params) -> Params:
    """Returns the parameters between the personal (weight 0) and the received ones (weight 1)."""
    return {k: torch.lerp(own[k], received[k], w) for k, w in weights.items()}


@dataclass(frozen=True)
class LearnAggregationWeights:
    """Learns the weights only, if the client has a personal model. The report has the metric "done", 1 if it has."""

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
    """Aggregates the received model into the personal one, trains and sends it, and keeps it with the weights."""

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
        """Returns the state in which training starts from the interpolated model."""
        unchanged = {k: state[k] for k in ("lr", "loss", "weights")}
        return unchanged | self.training.start_at(
            self.aggregation.initial_model(state), anchor=state["below"] | state["received"]
        )

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training.end(task, state, counts)
        return report, {"model": self.training.current_model(state), "weights": state["weights"]}


def aggregated_predict(aggregation: LocalAggregation) -> Predict:
    """Returns the function that predicts with the newest global model, aggregated by the weights learned last."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        state = aggregation.begin(models["global"], private)
        return aggregation.model.predict(aggregation.initial_model(state), x)

    return predict
