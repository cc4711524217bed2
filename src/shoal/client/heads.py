"""Heads of many clients on one base: clients report them, and a gate mixes them (PM-MoE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from shoal.client.gate import FitGate
from shoal.models import Model
from shoal.report_validation import ReportSpec
from shoal.types import Params, Phase, Predict, Report, Task, Tree


@dataclass(frozen=True)
class SendHead:
    """Reports the head that the client has trained. A client without a head of its own reports nothing."""

    model: Model | None = None  # the model whose heads are reported; without it, their shapes are not checked
    name: str = "heads"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"head": private["head"]} if "head" in private else {}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(state), None

    def report_spec(self, task: Task) -> ReportSpec | None:
        """Returns the shapes of the model's head. The head itself is private, so a run without it shows nothing."""
        if self.model is None:
            return None
        _, head = self.model.split_base_and_head(self.model.init(0))
        return ReportSpec.from_report(Report({"head": head}), may_be_empty=True)


def head_logits(model: Model, base: Params, heads: Params, x: Tensor) -> Tensor:
    """Returns the logits of stacked heads [samples, heads, classes]. The base is run once."""
    return vmap(lambda head: model.predict(base | head, x), out_dims=1)(heads)


def stack_heads(own: Params, others: Params | None) -> Params:
    """Returns the client's head and the stacked heads of others as one stack, with the client's head first."""
    return {k: torch.cat([x[None], others[k]]) if others else x[None] for k, x in own.items()}


@dataclass(frozen=True)
class MixHeads:
    """Trains a gate over the client's own head and the heads of others. Base and heads are frozen."""

    fit: FitGate
    name: str = "personalise"

    @property
    def batchable(self) -> bool:
        return self.fit.model.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.fit.phases(lambda state, x: head_logits(self.fit.model, state["base"], state["heads"], x))

    def begin(self, task: Task, private: Tree) -> Tree:
        own = private.get("head", task.models["head"])
        heads = stack_heads(own, task.models.get("heads"))
        num_heads = len(next(iter(heads.values())))
        trained = {k: v for k, v in private.items() if k == "head"}  # empty if the client uses the first head
        return {"base": task.models["base"], "heads": heads, "own": trained} | self.fit.begin(num_heads, task.seed)

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(), state["own"] | {"gate": state["gate"]}


def mixed_heads_predict(fit: FitGate) -> Predict:
    """Returns the function that predicts with the client's gate.

    A client without a gate for as many heads predicts with its own head, and a client without a head with the first.
    """
    model, gate = fit.model, fit.gate

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        own = private.get("head", models["head"])
        heads = stack_heads(own, models.get("heads"))
        if "gate" not in private or len(private["gate"]["bias2"]) != len(next(iter(heads.values()))):
            return model.predict(models["base"] | own, x)
        logits = head_logits(model, models["base"], heads, x)
        return gate.mixture_logits(gate.log_weights(gate.scores(private["gate"], x), logits), logits)

    return predict
