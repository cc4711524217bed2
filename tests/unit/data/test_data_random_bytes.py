"""A file of a user may contain any bytes: it is read, or refused in one line.

Files of SVHN are missing here, because SciPy's reader of MATLAB files crashes the process on some damaged files.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal.data import load
from shoal.data.readers import read_cifar, read_idx
from shoal.errors import UserError

X, Y = np.random.default_rng(0).normal(5.0, 2.0, (40, 3)), np.tile([0, 1], 20)
TEXT = "größe,b,label\n" + "".join(f"{i},{i * i},{'süß' if i % 2 else 'herb'}\n" for i in range(40))


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


@cache
def undamaged_files() -> dict[str, bytes]:
    pixels = np.arange(9 * 8 * 3, dtype=np.uint8).reshape(9, 8, 3)
    table = pa.table({"a": X[:, 0], "lists": X[:, 1:].tolist(), "label": ["x", "y"] * 20})
    idx = b"\0\0\x08\x03" + np.array([2, 3, 3], ">u4").tobytes() + bytes(18)
    return {
        "a.npz": _bytes(lambda f: np.savez(f, x=X, y=Y)),
        "packed.npz": _bytes(lambda f: np.savez_compressed(f, x=X, y=Y)),
        "single.npz": _bytes(lambda f: np.save(f, X)),
        "utf8.csv": TEXT.encode(),
        "utf16.csv": TEXT.replace(",", "\t").encode("utf-16"),
        "latin1.csv": TEXT.encode("latin-1"),
        "a.parquet": _bytes(lambda f: pa.parquet.write_table(table, f)),
        "a.png": _bytes(lambda f: Image.fromarray(pixels).save(f, "png")),
        "a.jpg": _bytes(lambda f: Image.fromarray(pixels).save(f, "jpeg")),
        "idx": idx,
        "idx.gz": gzip.compress(idx),
        "cifar.bin": bytes(2 * 3073),
    }


def read(path: Path) -> object:
    if path.suffix in (".npz", ".csv", ".parquet"):
        return load(str(path))
    if path.suffix in (".png", ".jpg"):
        return load(str(path.parents[1]))
    return read_cifar([path], 10) if path.suffix == ".bin" else read_idx(path)


@st.composite
def contents(draw: st.DrawFn, undamaged: bytes) -> bytes:
    """Draws any bytes, or an undamaged file in which some bytes are changed, removed or added."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(undamaged)
    for _ in range(draw(st.integers(1, 4))):
        start, num_replaced = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 1, 2, 4, len(data)]))
        # Draws tend to be small, but the directory of an archive is at the end of the file.
        start = max(0, len(data) - start) if draw(st.booleans()) else start
        data[start : start + num_replaced] = draw(st.binary(max_size=4))
    return bytes(data)


def write_files(folder: Path, name: str, content: bytes) -> Path:
    """Writes the file three times in each of two folders, so that a folder of images has enough images."""
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(exist_ok=True)
        for number in ("", "2", "3"):
            (folder / kind / f"{number}{name}").write_bytes(content)
    return folder / "cat" / name


@pytest.mark.parametrize("name", undamaged_files())
def test_undamaged_files_can_be_read(name, tmp_path):
    """The next test damages these files, so they must be correct."""
    path = write_files(tmp_path, name, undamaged_files()[name])
    with pytest.raises(UserError) if name in ("single.npz", "latin1.csv") else nullcontext():
        read(path)


@pytest.mark.parametrize("name", undamaged_files())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_any_bytes_are_read_or_refused_in_one_line(name, tmp_path, drawn):
    path = write_files(tmp_path, name, drawn.draw(contents(undamaged_files()[name])))
    try:
        read(path)
    except UserError as error:
        text = str(error).replace(str(tmp_path), "")
        assert text.isprintable() and len(text) < 1000
