"""Files of users that are small on disk and large in memory are refused before they are unpacked."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from untrusted import peak_bytes

from shoal.data import limits, load
from shoal.data.readers import read_idx
from shoal.errors import UserError

MIB = 2**20
Y = np.tile([0, 1], 50)


def npy_header(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": shape, "fortran_order": False, "descr": dtype})
    return stream.getvalue()


def write_npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def refuse(path: Path, sentence: str, read=lambda path: load(str(path), label_column="label")) -> None:
    """Checks that the file is refused with this sentence, and that much less than its claim is allocated."""

    def act() -> None:
        with pytest.raises(UserError, match=sentence) as caught:
            read(path)
        assert str(caught.value).isprintable()

    start_s, before = time.monotonic(), pa.total_allocated_bytes()
    assert peak_bytes(act) < 64 * MIB
    assert pa.total_allocated_bytes() - before < 64 * MIB
    assert time.monotonic() - start_s < 5


@pytest.fixture
def small_limits(monkeypatch):
    """Limits that a test can exceed with files that are made in no time."""
    monkeypatch.setattr(limits, "ALWAYS_BYTES", 8 * MIB)


def label_bytes() -> bytes:
    stream = io.BytesIO()
    np.save(stream, Y)
    return stream.getvalue()


def test_an_npy_header_that_claims_10_gb(tmp_path):
    path = write_npz(tmp_path / "a.npz", x=npy_header((100, 12_500_000)) + bytes(64), y=label_bytes())
    refuse(path, r"its array x has 64 bytes, but its header announces 10000000000")


@pytest.mark.parametrize("shape", [(2**62, 4), (0, 2**80), (-1, 3), (100, 2**63)])
def test_npy_headers_of_impossible_shapes(tmp_path, shape):
    refuse(write_npz(tmp_path / "a.npz", x=npy_header(shape) + bytes(64), y=label_bytes()), r"a\.npz")


def test_a_zip_bomb(tmp_path, small_limits):
    zeros = npy_header((100, 125_000)) + bytes(100 * 125_000 * 8)
    path = write_npz(tmp_path / "a.npz", x=zeros, y=label_bytes())
    assert path.stat().st_size < MIB
    refuse(path, r"would have 100001\d{3} bytes in memory, which is more than 100 times its size")


def test_a_zip_whose_members_share_their_content(tmp_path, small_limits):
    """Every member of the directory names the same compressed bytes."""
    path = write_npz(
        tmp_path / "a.npz", y=label_bytes(), **{f"x{i}": npy_header((2 * MIB,)) + bytes(16 * MIB) for i in range(2)}
    )
    refuse(path, r"more than 100 times its size")


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_loaded(tmp_path):
    path, canary = tmp_path / "a.npz", tmp_path / "unpickled"
    np.savez(path, x=np.array([Canary(canary)] * 4, dtype=object), y=Y[:4])
    refuse(path, "arrays of Python objects are refused")
    write_npz(path, x=pickle.dumps(Canary(canary)), y=label_bytes())
    refuse(path, r"a\.npz")
    assert not canary.exists()


def png_header(width: int, height: int) -> bytes:
    """Returns an image that is complete but for its pixels, which are a short stream of zeros."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    body = chunk(b"IHDR", size + b"\x08\x02\0\0\0") + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(9000, 9000), (30_000, 30_000), (2**31 - 1, 1)])
@pytest.mark.filterwarnings("error")
def test_an_image_that_claims_many_pixels(tmp_path, size):
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1.png").write_bytes(png_header(*size))
    refuse(tmp_path, r"1\.png: .*pixels")


def test_many_small_files_of_large_images(tmp_path, small_limits):
    image = io.BytesIO()
    Image.new("RGB", (1000, 1000)).save(image, "png")
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for i in range(5):
            (tmp_path / kind / f"{i}.png").write_bytes(image.getvalue())
    refuse(tmp_path, r"would have \d+ bytes in memory")


def test_a_parquet_file_of_many_equal_values(tmp_path, small_limits):
    path, rows = tmp_path / "a.parquet", 4 * MIB
    table = pa.table({"a": np.zeros(rows), "label": np.zeros(rows, np.int8)})
    pa.parquet.write_table(table, path, compression="zstd")
    refuse(path, r"bytes in memory, which is more than 100 times its size")


def test_a_parquet_file_of_long_equal_texts(tmp_path, small_limits):
    """The dictionary of a column names a text once, and every row repeats it."""
    path, rows = tmp_path / "a.parquet", 20_000
    pa.parquet.write_table(pa.table({"a": np.arange(rows, dtype=float), "label": ["x" * 4000] * rows}), path)
    refuse(path, r"bytes in memory, which is more than 100 times its size")
    texts = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["x" * 4000])
    pa.parquet.write_table(pa.table({"a": np.arange(rows, dtype=float), "label": texts}), path)
    refuse(path, r"column 'label' has a label of 4000 bytes, but it may have at most 1000")


def test_a_long_label_in_a_csv_file(tmp_path):
    """Labels are held in the width of the longest one."""
    path = tmp_path / "a.csv"
    path.write_text("a,label\n" + "".join(f"{i},{'x' * (100_000 if i == 0 else 1)}\n" for i in range(10_000)))
    refuse(path, r"has a label of 100000 bytes")


def test_a_gzip_bomb(tmp_path, small_limits):
    header = b"\0\0\x08\x01" + np.array([100 * MIB], ">u4").tobytes()
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(header + bytes(100 * MIB)))
    refuse(path, r"bytes in memory", read_idx)


def test_a_table_with_very_many_columns(tmp_path):
    """The search for columns of the same name must not compare all pairs."""
    names = [f"c{i}" for i in range(60_000)]
    path = tmp_path / "a.csv"
    path.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    start_s = time.monotonic()
    with pytest.raises(UserError, match="there is no label column 'label'"):
        load(str(path), label_column="label")
    assert time.monotonic() - start_s < 5


def test_files_within_the_limits_are_read(tmp_path, small_limits):
    """A large file is accepted if it is not much smaller on disk."""
    x = np.random.default_rng(0).normal(size=(100, 20_000))
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    assert len(load(str(tmp_path / "a.npz")).classes) == 2
