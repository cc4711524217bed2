"""Small fleets whose clients differ in size and classes, for every test that needs one."""

from __future__ import annotations

import os

import pytest
import torch

from shoal.data import Federation
from shoal.types import Examples

torch.set_num_threads(1)  # small tensors: more threads only wait for each other


def tiny_federation(clients: int = 6, shape: tuple[int, ...] = (6,), classes: int = 4, seed: int = 0) -> Federation:
    """Clients of unequal size with two classes each; classes lie around separate centres."""
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, *shape, generator=g)

    def draw(rows: int, held: torch.Tensor) -> Examples:
        y = held[torch.randint(0, len(held), (rows,), generator=g)]
        return Examples(torch.randn(rows, *shape, generator=g) + centres[y], y)

    data = {}
    for i in range(clients):
        held = torch.tensor([i % classes, (i + 1) % classes])
        data[f"c{i}"] = {"train": draw(9 + 7 * i, held), "val": draw(3 + i, held), "test": draw(5 + 2 * i, held)}
    central = draw(40, torch.arange(classes))
    return Federation.from_clients(data, central, tuple(str(k) for k in range(classes)))


@pytest.fixture
def tiny() -> Federation:
    return tiny_federation()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and not os.environ.get("SHOAL_DATA"):
        message = "needs the real data sets: set SHOAL_DATA (see docs/data.md)"
        if os.environ.get("SHOAL_NO_SKIP"):
            pytest.fail(message)
        pytest.skip(message)
