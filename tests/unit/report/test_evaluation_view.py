"""The output of `shoal evaluate`."""

from __future__ import annotations

import pytest
from rich.console import Console

from shoal.report import evaluation_view


@pytest.mark.parametrize(
    ("count", "is_unseen", "text"),
    [
        (1, True, "1 unseen client"),
        (2, True, "2 unseen clients"),
        (1, False, "1 client\n"),
        (3, False, "3 clients\n"),
    ],
)
def test_the_number_of_clients_agrees_with_its_noun(count, is_unseen, text):
    accuracy = {"local": 0.5, "std": None, "worst10": None, "f1": None, "central": None}
    evaluation = {"method": "fedavg", "round": 1, "accuracy": accuracy, "clients": {f"c{i}": {} for i in range(count)}}
    console = Console(width=100)
    with console.capture() as printed:
        console.print(evaluation_view(evaluation | ({"num_unseen_clients": count} if is_unseen else {})))
    lines = [line.rstrip() for line in printed.get().splitlines()]
    assert f"fedavg after round 1: {text}" in "\n".join(lines)
