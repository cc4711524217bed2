"""Dropout whose mask follows from the step's key, so that stacked clients and a lone one agree."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.rng import uniform


class KeyedDropout(nn.Module):
    """Identity without a key (evaluation); `stream` tells the layers of one network apart."""

    def __init__(self, p: float, stream: int) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if key is None or self.p == 0:
            return x
        keep = uniform(key, tuple(x.shape), self.stream) >= self.p
        return x * keep / (1 - self.p)
