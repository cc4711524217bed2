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
    """PyTorch's SGD (momentum without dampening, coupled weight decay) after clipping by global norm."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # 0: no clipping

    def init(self, params: Params) -> Params:
        """Velocities; none without momentum, so that nothing is carried that is not used."""
        return {k: torch.zeros_like(p) for k, p in params.items()} if self.momentum else {}

    def update(self, params: Params, slopes: Params, velocity: Params, lr: Tensor) -> tuple[Params, Params]:
        if self.clip:
            slopes = clipped(slopes, self.clip)
        if self.weight_decay:
            slopes = {k: g + self.weight_decay * params[k] for k, g in slopes.items()}
        if self.momentum:
            velocity = {k: torch.add(g, velocity[k], alpha=self.momentum) for k, g in slopes.items()}
            slopes = velocity
        return {k: torch.addcmul(p, slopes[k], lr, value=-1) for k, p in params.items()}, velocity


def squared_norm(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in tensors.values()]).sum()


def clipped(slopes: Params, limit: float) -> Params:
    scale = (limit / (squared_norm(slopes).sqrt() + 1e-6)).clamp(max=1.0)
    return {k: g * scale for k, g in slopes.items()}


RateSchedule = Literal["constant", "cosine", "step", "exponential", "warmup-cosine"]
SCHEDULES: tuple[str, ...] = get_args(RateSchedule)


def learning_rate(schedule: str, lr: float, round: int, rounds: int, decay: float = 0.1) -> float:
    """The rate of a round that counts from 0. `decay` is what is left at the end (step: a third each)."""
    done = round / max(1, rounds)
    match schedule:
        case "constant":
            return lr
        case "cosine":
            return lr * (decay + (1 - decay) * 0.5 * (1 + math.cos(math.pi * done)))
        case "step":
            return lr * decay ** (min(2, math.floor(3 * done)) / 2)
        case "exponential":
            return lr * decay**done
        case "warmup-cosine":
            warm = max(1, rounds // 20)
            if round < warm:
                return lr * (round + 1) / warm
            return learning_rate("cosine", lr, round - warm, rounds - warm, decay)
    raise UserError(f"train.schedule {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
