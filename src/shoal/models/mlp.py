"""Dense networks: `mlp` (two hidden layers, as in Pereira et al. 2025) and `linear`."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.dropout import KeyedDropout


class Mlp(nn.Module):
    """Two hidden layers (64, 30), with dropout after both: 52,500 parameters on 28 x 28 and ten classes."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        hidden: tuple[int, int] = (64, 30),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(input_shape), hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.drop1, self.drop2 = KeyedDropout(dropout, 1), KeyedDropout(dropout, 2)
        self.head = nn.Linear(hidden[1], num_classes)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Returns the logits."""
        x = self.drop1(F.relu(self.fc1(x.flatten(1))), key)
        x = self.drop2(F.relu(self.fc2(x)), key)
        return self.head(x)


class Linear(nn.Module):
    """Multinomial logistic regression."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        return self.head(x.flatten(1))
