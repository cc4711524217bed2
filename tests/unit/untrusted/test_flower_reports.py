"""A Flower client that sends no report, but other bytes, does not end the run of the others."""

from __future__ import annotations

import pytest

from shoal.codec import encode_report
from shoal.types import Plan, Report, Task

flower = pytest.importorskip("shoal.fleet.flower")

from flwr.app import Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from shoal.fleet.messages import _envelope, report_record  # noqa: E402

CONTENTS = {
    "good": report_record("p", Report({}, {"loss": (1.0, 2.0)})),
    "truncated": _envelope(encode_report(Report())[:-3], "p"),
    "random": _envelope(b"\xff" * 50, "p"),
    "empty": RecordDict({}),
}


class OtherClients:
    """A Grid whose clients send the contents above."""

    def __init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def send_and_receive(self, messages, *, timeout=None):
        for message, content in zip(messages, CONTENTS.values(), strict=True):
            yield Message(content=content, reply_to=message)


def test_only_the_readable_reports_are_returned(caplog):
    class Program:
        name = "p"

    fleet = flower.FlowerFleet(OtherClients(), {name: number for number, name in enumerate(CONTENTS, start=1)})
    reports = fleet.execute(Plan(Program(), {name: Task() for name in CONTENTS}))
    assert list(reports) == ["good"]
    assert "The report of client truncated is refused: the message is damaged" in caplog.text
