"""What `shoal evaluate` prints."""

from __future__ import annotations

import pytest
from rich.console import Console

from shoal.report import evaluation_view


@pytest.mark.parametrize(
    ("count", "unseen", "said"),
    [
        (1, True, "1 client that never trained"),
        (2, True, "2 clients that never trained"),
        (1, False, "1 client\n"),
        (3, False, "3 clients\n"),
    ],
)
def test_one_client_is_no_clients(count, unseen, said):
    accuracy = {"mean": 0.5, "std": None, "worst10": None, "f1": None, "central": None}
    found = {"method": "fedavg", "round": 1, "accuracy": accuracy, "clients": {f"c{i}": {} for i in range(count)}}
    console = Console(width=100)
    with console.capture() as printed:
        console.print(evaluation_view(found | ({"unseen": count} if unseen else {})))
    lines = [line.rstrip() for line in printed.get().splitlines()]
    assert f"fedavg after round 1: {said}" in "\n".join(lines)
