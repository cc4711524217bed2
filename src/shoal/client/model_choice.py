"""Choice of the received model that fits the client's samples best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shoal.client.train import LocalTraining, cross_entropy
from shoal.models import Model
from shoal.types import Batch, Params, Phase, Report, Task, Tree


@dataclass(frozen=True)
class ChooseModel:
    """Reports which received model fits the client's samples best, as an index into the sorted names.

    By `loss` this is the model with the lowest loss. By `hits` it is the model with the most correct predictions and,
    of several such models, the lowest loss. Of equal models the first is chosen.
    """

    model: Model
    criterion: Literal["loss", "hits"] = "loss"
    split: str = "train"
    name: str = "choose"
    batchable: bool = True  # predictions of a sample do not depend on other samples

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        models = {name: task.models[name] for name in sorted(task.models)}
        zeros = torch.zeros(len(models), device=self.model.device)
        return {"models": models, "losses": zeros, **({"hits": zeros} if self.criterion == "hits" else {})}

    def step(self, state: Tree, batch: Batch) -> Tree:
        """Returns the state with the losses and hits of a batch added.

        One model after the other is run, because stacked models would be copied for every client.
        """
        logits = [self.model.predict(m, batch.x) for m in state["models"].values()]
        losses = state["losses"] + torch.stack([cross_entropy(x, batch) for x in logits])
        if self.criterion == "loss":
            return state | {"losses": losses}
        hits = torch.stack([((x.argmax(-1) == batch.y) * batch.w).sum() for x in logits])
        return state | {"losses": losses, "hits": state["hits"] + hits}

    def best_index(self, state: Tree) -> Tensor:
        """Returns the index of the best model."""
        losses: Tensor = state["losses"]
        if self.criterion == "hits":
            finite = losses.clamp(max=torch.finfo(losses.dtype).max)
            losses = torch.where(state["hits"] == state["hits"].amax(), finite, torch.inf)
        return losses.argmin()

    def chosen_model(self, state: Tree) -> Params:
        """Returns the best model."""
        index, models = self.best_index(state), list(state["models"].values())
        return {k: torch.stack([m[k] for m in models]).index_select(0, index[None]).squeeze(0) for k in models[0]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        choice, num_samples = self.best_index(state), counts[self.split]
        loss = (float(state["losses"][choice]), float(num_samples))
        return Report({"choice": {"place": choice}}, {"loss": loss}, {"train": num_samples}), None


@dataclass(frozen=True)
class ChooseAndTrain:
    """Trains the received model that fits the client's samples best."""

    training: LocalTraining
    criterion: Literal["loss", "hits"] = "loss"
    split: str = "train"  # the samples on which models are compared
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def choice(self) -> ChooseModel:
        """The program that compares the models."""
        return ChooseModel(self.training.model, self.criterion, self.split)

    @property
    def phases(self) -> tuple[Phase, ...]:
        (compare,) = self.choice.phases
        return (replace(compare, on_end=self.start_from_choice), *self.training.phases)

    def begin(self, task: Task, private: Tree) -> Tree:
        return self.training.begin(task, private) | self.choice.begin(task, private)

    def start_from_choice(self, state: Tree) -> Tree:
        """Returns the state in which training starts from the chosen model."""
        chosen = self.choice.chosen_model(state)
        unchanged = {k: v for k, v in state.items() if k not in ("models", "losses", "hits")}
        return unchanged | self.training.start_at(chosen, anchor=chosen) | {"place": self.choice.best_index(state)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, private = self.training.end(task, state, counts)
        return replace(report, tensors={**report.tensors, "choice": {"place": state["place"]}}), private
