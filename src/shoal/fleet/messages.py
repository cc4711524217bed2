"""Tasks and reports as messages of Flower.

A message contains the bytes of `shoal.codec` in an array of Flower. The ledger therefore counts the bytes that are
sent, and Flower cuts large models into chunks as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from shoal.codec import decode_report, decode_task, encode_report, encode_task
from shoal.errors import UserError
from shoal.types import Params, Report, Task

MODELS_MISSING = "lost"  # the config record of a reply from a client that lacks cached models


def _envelope(data: bytes, program: str) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype="shoal.safetensors", data=data)
    return RecordDict({"payload": ArrayRecord({"data": array}), "shoal": ConfigRecord({"program": program})})


def _payload(content: RecordDict) -> bytes:
    try:
        return content.array_records["payload"]["data"].data
    except KeyError as error:
        raise UserError(f"the message is damaged: it has no {error}.") from None


def task_record(program: str, task: Task) -> RecordDict:
    """Returns the content of a message with a task for the program of this name."""
    return _envelope(encode_task(task), program)


def read_task(content: RecordDict, cached_models: Mapping[int, Params] | None = None) -> tuple[str, Task]:
    """Returns the name of the program and the task of a message."""
    return str(content.config_records["shoal"]["program"]), decode_task(_payload(content), cached_models)


def report_record(program: str, report: Report) -> RecordDict:
    """Returns the content of a message with a report of the program of this name."""
    return _envelope(encode_report(report), program)


def read_report(content: RecordDict) -> Report:
    """Returns the report of a message."""
    return decode_report(_payload(content))
