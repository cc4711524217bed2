"""The progress of a run shows the metrics of the round in the same line."""

import io

import pytest
from rich.console import Console

from shoal.cli.progress import RunProgress
from shoal.engine import Evaluation, RoundRecord
from shoal.metrics import Score


def record(round_number, accuracy=None, loss=None):
    found = None if accuracy is None else Evaluation({"c0": Score(accuracy, 1.0, accuracy, 10)}, None)
    return RoundRecord(round_number, 1, {} if loss is None else {"train.loss": loss}, 0, 0, found)


ROUNDS = [record(1, loss=2.0), record(2, accuracy=0.5, loss=1.0), record(3, loss=0.9), record(4), record(5, 0.75, 0.5)]


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr("shoal.cli.progress.LINE_EVERY_S", 0.0)

    def show(terminal):
        stream = io.StringIO()
        shown_metrics = []
        with RunProgress(Console(file=stream, force_terminal=terminal, width=200), "fedavg", 5) as progress:
            for one in ROUNDS:
                progress.on_round(one)
                shown_metrics.append(progress._bar.tasks[0].fields["metrics"] if terminal else "")
        return shown_metrics if terminal else stream.getvalue().splitlines()

    return show


def test_between_evaluations_there_is_the_loss_of_the_round_and_no_old_accuracy(shown):
    right = ["loss 2.000", "local 50.0%  loss 1.000", "loss 0.900", "", "local 75.0%  loss 0.500"]
    assert shown(terminal=True) == right
    for number, (line, figures) in enumerate(zip(shown(terminal=False), right, strict=True), start=1):
        assert line.startswith(f"fedavg  round {number}/5  {figures}")
        assert ("loss" in line) == bool(figures)
        assert ("local" in line) == ("local" in figures)
