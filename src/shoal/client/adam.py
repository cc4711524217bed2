"""Adam as pure functions, for small networks that are trained on top of frozen models, such as a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.types import Params, Tree


@dataclass(frozen=True)
class Adam:
    """Computes the same steps as PyTorch's Adam without weight decay."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, params: Params) -> Tree:
        """Returns the state before the first step: both moving averages and the number of steps."""
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        device = next(iter(params.values())).device
        return {"mean": zeros, "square": dict(zeros), "steps": torch.zeros((), device=device)}

    def update(self, params: Params, gradients: Params, state: Tree) -> tuple[Params, Tree]:
        """Returns the parameters and the state after one step."""
        steps = state["steps"] + 1
        mean = {k: self.beta1 * state["mean"][k] + (1 - self.beta1) * g for k, g in gradients.items()}
        square = {k: self.beta2 * state["square"][k] + (1 - self.beta2) * g * g for k, g in gradients.items()}
        bias1, bias2 = 1 - self.beta1**steps, 1 - self.beta2**steps
        new_params = {
            k: p - self.lr * (mean[k] / bias1) / ((square[k] / bias2).sqrt() + self.eps) for k, p in params.items()
        }
        return new_params, {"mean": mean, "square": square, "steps": steps}
