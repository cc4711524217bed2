"""Heads of many clients on one base: told to the server, and mixed by a gate (PM-MoE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from shoal.client.gate import FitGate
from shoal.models import Model
from shoal.types import Params, Phase, Predict, Report, Task, Tree


@dataclass(frozen=True)
class SendHead:
    """The head that the client has trained for itself; nothing of one who has none."""

    name: str = "heads"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"head": private["head"]} if "head" in private else {}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(state), None


def head_logits(model: Model, base: Params, heads: Params, x: Tensor) -> Tensor:
    """Logits [rows, heads, classes] of heads that are stacked; the base is run once."""
    return vmap(lambda head: model.predict(base | head, x), out_dims=1)(heads)


def stack_heads(own: Params, others: Params | None) -> Params:
    return {k: torch.cat([x[None], others[k]]) if others else x[None] for k, x in own.items()}


@dataclass(frozen=True)
class MixHeads:
    """A gate over the client's own head and those of others, on the received base. Heads and base are frozen."""

    fit: FitGate
    name: str = "personalise"

    @property
    def batchable(self) -> bool:
        return self.fit.model.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.fit.phases(lambda s, x: head_logits(self.fit.model, s["base"], s["heads"], x))

    def begin(self, task: Task, private: Tree) -> Tree:
        own = private.get("head", task.models["head"])
        heads = stack_heads(own, task.models.get("heads"))
        count = len(next(iter(heads.values())))
        trained = {k: v for k, v in private.items() if k == "head"}  # the first head is nobody's own
        return {"base": task.models["base"], "heads": heads, "own": trained} | self.fit.begin(count, task.seed)

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(), state["own"] | {"gate": state["gate"]}


def mixed_heads_predict(fit: FitGate) -> Predict:
    """Whoever has no gate for just these heads uses its own, and who has none the first."""
    model, gate = fit.model, fit.gate

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        own = private.get("head", models["head"])
        heads = stack_heads(own, models.get("heads"))
        if "gate" not in private or len(private["gate"]["bias2"]) != len(next(iter(heads.values()))):
            return model.predict(models["base"] | own, x)
        logits = head_logits(model, models["base"], heads, x)
        return gate.mixture_logits(gate.log_weights(gate.scores(private["gate"], x), logits), logits)

    return predict
