"""Tasks and reports as Flower's messages.

What travels is `shoal.codec`'s bytes in an array of Flower's, so the ledger's count is the length of what was sent, and
Flower cuts large models into chunks as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from shoal.codec import decode_report, decode_task, encode_report, encode_task
from shoal.types import Params, Report, Task

MODELS_MISSING = "lost"


def _envelope(data: bytes, program: str) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype="shoal.safetensors", data=data)
    return RecordDict({"payload": ArrayRecord({"data": array}), "shoal": ConfigRecord({"program": program})})


def _payload(content: RecordDict) -> bytes:
    return content.array_records["payload"]["data"].data


def task_record(program: str, task: Task) -> RecordDict:
    return _envelope(encode_task(task), program)


def read_task(content: RecordDict, cached_models: Mapping[int, Params] | None = None) -> tuple[str, Task]:
    return str(content.config_records["shoal"]["program"]), decode_task(_payload(content), cached_models)


def report_record(program: str, report: Report) -> RecordDict:
    return _envelope(encode_report(report), program)


def read_report(content: RecordDict) -> Report:
    return decode_report(_payload(content))
