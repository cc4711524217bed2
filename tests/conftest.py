from __future__ import annotations

import os

import pytest
import torch
from federations import tiny_federation

from shoal.data import Federation

torch.set_num_threads(1)  # small tensors: more threads only wait for each other


@pytest.fixture
def tiny() -> Federation:
    return tiny_federation()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("data") and not os.environ.get("SHOAL_DATA"):
        message = "needs the real data sets: set SHOAL_DATA (see docs/data.md)"
        if os.environ.get("SHOAL_NO_SKIP"):
            pytest.fail(message)
        pytest.skip(message)
