import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import codec, tree
from shoal.types import Report, Task

MODEL = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(4)}


def test_task_round_trip_and_size():
    task = Task({"b": MODEL, "a": MODEL}, {"lr": 0.1, "first": 2.0**47 + 1}, seed=2**47 + 3)
    data = codec.encode_task(task)
    back = codec.decode_task(data)
    assert len(data) == codec.task_bytes(task)
    assert back.seed == task.seed
    assert dict(back.config) == dict(task.config)
    assert tree.max_abs_difference(dict(back.models), dict(task.models)) == 0


def test_empty_task_and_report():
    assert codec.decode_task(codec.encode_task(Task(seed=5))) == Task(seed=5)
    assert codec.decode_report(codec.encode_report(Report())) == Report()


def test_report_round_trip_and_size():
    report = Report({"model": MODEL}, {"loss": (1.25, 3.0), "accuracy": (2.0, 3.0)}, {"train": 3, "val": 0})
    data = codec.encode_report(report)
    back = codec.decode_report(data)
    assert len(data) == codec.report_bytes(report)
    assert back.metrics == report.metrics
    assert back.counts == report.counts


def test_size_does_not_depend_on_values():
    small, large = (
        Report({}, {"loss": (1.0, 1.0)}, {"train": 1}),
        Report({}, {"loss": (0.1234567, 1e9)}, {"train": 10**9}),
    )
    assert len(codec.encode_report(small)) == len(codec.encode_report(large))


def test_aliases_are_written_twice():
    t = {"a": MODEL["w"], "b": MODEL["w"], "c": MODEL["w"][0]}
    back, _ = codec.unpack(codec.pack(t))
    assert tree.max_abs_difference(back, t) == 0


def test_the_order_of_names_does_not_change_the_bytes():
    forward = codec.pack({"a": torch.ones(2), "b": torch.zeros(3)}, {"x": 1, "y": 2})
    backward = codec.pack({"b": torch.zeros(3), "a": torch.ones(2)}, {"y": 2, "x": 1})
    assert forward == backward


def test_the_format_is_safetensors():
    data = codec.pack({"a": torch.ones(2)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["a"]["shape"] == [2]


names = st.text(min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4), names)
def test_any_names_and_shapes(shapes, outer):
    t = {outer: {k: torch.rand(shape) for k, shape in shapes.items()}}
    back, _ = codec.unpack(codec.pack(t))
    assert tree.max_abs_difference(back, t) == 0
    assert codec.packed_bytes(t) == len(codec.pack(t))
