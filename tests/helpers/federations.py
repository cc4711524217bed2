"""Small fleets whose clients differ in size and classes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shoal.data import Federation
from shoal.data.federation import SPLITS
from shoal.types import ClientId, Samples


def tiny_federation(clients: int = 6, shape: tuple[int, ...] = (6,), classes: int = 4, seed: int = 0) -> Federation:
    """Returns clients of unequal size with two classes each. The samples of a class lie around its centre."""
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, *shape, generator=g)

    def draw(num_samples: int, present_classes: torch.Tensor) -> Samples:
        y = present_classes[torch.randint(0, len(present_classes), (num_samples,), generator=g)]
        return Samples(torch.randn(num_samples, *shape, generator=g) + centres[y], y)

    data = {}
    for i in range(clients):
        present = torch.tensor([i % classes, (i + 1) % classes])
        data[f"c{i}"] = {
            "train": draw(9 + 7 * i, present),
            "val": draw(3 + i, present),
            "test": draw(5 + 2 * i, present),
        }
    central = draw(40, torch.arange(classes))
    return Federation.from_clients(data, central, tuple(str(k) for k in range(classes)))


def invert_clients(federation: Federation, clients: Collection[ClientId]) -> Federation:
    """Returns the federation with the features of these clients negated."""
    data = {
        c: {s: Samples(-x, y) if c in clients else Samples(x, y) for s in SPLITS for x, y in [federation[c][s]]}
        for c in federation
    }
    return Federation.from_clients(data, federation.central, federation.classes)
