"""Stochastic gradient descent as pure functions, and learning-rate schedules over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.types import Params


@dataclass(frozen=True)
class Sgd:
    """Computes PyTorch's SGD (momentum without dampening, coupled weight decay) after clipping by global norm."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: no clipping

    def init(self, params: Params) -> Params:
        """Returns the velocities; none without momentum, because they would not be used."""
        return {k: torch.zeros_like(p) for k, p in params.items()} if self.momentum else {}

    def update(self, params: Params, gradients: Params, velocity: Params, lr: Tensor) -> tuple[Params, Params]:
        """Returns the parameters and the velocities after one step."""
        if self.clip:
            gradients = clip_gradients(gradients, self.clip)
        if self.weight_decay:
            gradients = {k: g + self.weight_decay * params[k] for k, g in gradients.items()}
        if self.momentum:
            velocity = {k: torch.add(g, velocity[k], alpha=self.momentum) for k, g in gradients.items()}
            gradients = velocity
        return {k: torch.addcmul(p, gradients[k], lr, value=-1) for k, p in params.items()}, velocity


def squared_norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the squared L2 norm of all tensors together."""
    return torch.stack([x.square().sum() for x in tensors.values()]).sum()


def clip_gradients(gradients: Params, max_norm: float) -> Params:
    """Returns the gradients, scaled down to `max_norm` if their L2 norm together is larger."""
    scale = (max_norm / (squared_norm(gradients).sqrt() + 1e-6)).clamp(max=1.0)
    return {k: g * scale for k, g in gradients.items()}


RateSchedule = Literal["constant", "cosine", "step", "exponential", "warmup-cosine"]
SCHEDULES: tuple[str, ...] = get_args(RateSchedule)


def learning_rate(schedule: str, lr: float, round_index: int, num_rounds: int, decay: float = 0.1) -> float:
    """Returns the learning rate of a round, counted from 0.

    `decay` is the fraction of `lr` at the end. The schedule `step` reaches it in two steps, at one and at two thirds.
    """
    progress = round_index / max(1, num_rounds)
    match schedule:
        case "constant":
            return lr
        case "cosine":
            return lr * (decay + (1 - decay) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "step":
            return lr * decay ** (min(2, math.floor(3 * progress)) / 2)
        case "exponential":
            return lr * decay**progress
        case "warmup-cosine":
            num_warmup_rounds = max(1, num_rounds // 20)
            if round_index < num_warmup_rounds:
                return lr * (round_index + 1) / num_warmup_rounds
            return learning_rate("cosine", lr, round_index - num_warmup_rounds, num_rounds - num_warmup_rounds, decay)
    raise UserError(f"train.schedule {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
