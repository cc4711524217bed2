"""Tasks and reports may contain any bytes: they are decoded, or refused with one UserError."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from untrusted import damaged, peak_bytes, seeded, value_or_user_error

from shoal import codec, tree
from shoal.codec import MissingModel
from shoal.errors import UserError
from shoal.types import Report, Task

MODEL = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(4)}
TASK = codec.encode_task(Task({"global": MODEL}, {"lr": 0.1}, seed=3))
CACHED = codec.encode_task(Task({"global": MODEL}, {}, 3, digests={"global": 7}, cached=frozenset({"global"})))
REPORT = codec.encode_report(Report({"model": MODEL}, {"loss": (1.0, 2.0)}, {"train": 3}, 10))


def message(leaves: dict[str, torch.Tensor], meta: str) -> bytes:
    """Returns a message with these paths, which need not be those of a tree."""
    from safetensors.torch import save

    return save({path: x.clone() for path, x in leaves.items()}, {"shoal": meta})


def raw_message(header: str | bytes, payload: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + payload


def decode(data: bytes) -> None:
    """Decodes bytes as everything that the codec reads. A decoded value can be encoded again."""
    unpacked = value_or_user_error(codec.unpack, data)
    if isinstance(unpacked, tuple):
        assert tree.signature(codec.unpack(codec.pack(*unpacked))[0]) == tree.signature(unpacked[0])
    report = value_or_user_error(codec.decode_report, data)
    if isinstance(report, Report):
        assert codec.report_bytes(report) > 0
    try:
        task = value_or_user_error(codec.decode_task, data)
    except MissingModel:
        return
    if isinstance(task, Task):
        assert codec.task_bytes(task) > 0


@seeded(300)
@given(damaged(TASK, CACHED, REPORT))
def test_damaged_messages(data):
    decode(data)


# Names and shapes that messages have, and some that they must not have.
NAMES = (
    "config",
    "config/x",
    "seed",
    "digests",
    "models/g/w",
    "models",
    "metrics",
    "counts",
    "flops",
    "tensors/a",
    "a%2F",
)
DTYPES = (torch.float64, torch.int64, torch.bool, torch.float32, torch.complex64, torch.float8_e4m3fn)
META = (
    "null",
    "[]",
    "[[],[]]",
    '["lr"]',
    '[["a"],["b"]]',
    '[["a"],[]]',
    "5",
    '{"a":1}',
    "[1]",
    '[[["a"]],[{}]]',
    "NaN",
)
SHAPES = ([], [0], [1], [2], [1, 2], [2, 2], [0, 2])


@seeded(300)
@given(
    st.dictionaries(
        st.sampled_from(NAMES) | st.text(st.sampled_from("ab/%é"), max_size=4),
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
        max_size=7,
    ),
    st.sampled_from(META) | st.text(max_size=8),
)
def test_well_formed_messages_of_wrong_content(leaves, meta):
    decode(message({path: torch.zeros(shape).to(dtype) for path, (dtype, shape) in leaves.items()}, meta))


ENTRY = '{"dtype":"F64","shape":[],"data_offsets":[0,8]}'
DEEP_PATH = "a/" * 3000 + "a"


HOSTILE = {
    "empty": b"",
    "only a length": (10 * 2**30).to_bytes(8, "little"),
    "a length beyond any file": b"\xff" * 8,
    "a header of 10 GB that is not there": (10 * 2**30).to_bytes(8, "little") + b"{}" + bytes(100),
    "no metadata": raw_message('{"seed":' + ENTRY + "}", bytes(8)),
    "nested metadata": message({"seed": torch.tensor(1)}, "[" * 100_000),
    "nested header": raw_message("[" * 100_000),
    "a number of many digits": message({"seed": torch.tensor(1)}, "1" * 10_000),
    "a tensor of 10 GB that is not there": raw_message(
        '{"__metadata__":{"shoal":"null"},"w":{"dtype":"F32","shape":[2500000000],"data_offsets":[0,10000000000]}}'
    ),
    "a leaf that is also a tree": message({"a": torch.ones(1), "a/b": torch.ones(1)}, "null"),
    "the same name twice": message({"a": torch.ones(1), "%61": torch.ones(1)}, "null"),
    "a very deep tree": message({DEEP_PATH: torch.ones(1)}, "null"),
    "a seed of two numbers": message({"seed": torch.ones(2), "config": torch.ones(0), "counts": torch.ones(0)}, "[]"),
    "lone surrogate": message({"config": torch.ones(1).double(), "seed": torch.tensor(1)}, '["\\ud800"]'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_refused_without_allocating_what_they_claim(name):
    data = HOSTILE[name]

    def refuse() -> None:
        for read in (codec.unpack, codec.decode_report, codec.decode_task):
            is_tree = name in ("a seed of two numbers", "lone surrogate") and read is codec.unpack
            assert isinstance(value_or_user_error(read, data), UserError) != is_tree

    assert peak_bytes(refuse) < 50 * 2**20


def test_the_sentences_of_refused_messages():
    with pytest.raises(UserError, match=r"^the message is damaged: .*"):
        codec.decode_report(b"")
    report = json.loads(REPORT[8 : 8 + int.from_bytes(REPORT[:8], "little")])
    assert report["flops"]["dtype"] == "I64"
    with pytest.raises(UserError, match="'flops' is missing"):
        codec.decode_report(message({"counts": torch.ones(0).long(), "metrics": torch.ones(0, 2).double()}, "[[],[]]"))
    with pytest.raises(UserError, match="'a' is both a tensor and a tree"):
        codec.unpack(message({"a": torch.ones(1), "a/b": torch.ones(1)}, "null"))
