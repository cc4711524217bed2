from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from shoal.data.readers import read_cifar, read_idx, read_idx_images, read_idx_labels, read_svhn
from shoal.errors import UserError


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read_gzipped_or_not(tmp_path: Path, pack) -> None:
    path = tmp_path / "images"
    path.write_bytes(pack(idx(IMAGES)))
    assert read_idx(path).tolist() == IMAGES.tolist()
    assert read_idx_images(path).shape == (2, 1, 2, 3)


def test_idx_numbers_are_big_endian(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(idx(np.array([[1, 258]], dtype=">i4"), kind=0x0C))
    assert read_idx(path).tolist() == [[1, 258]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file: it begins with nothing"),
        (b"PK\x03\x04rest", "not an idx file: it begins with 504b0304"),
        (idx(IMAGES)[:10], "truncated: 10 bytes, but its header alone has 16"),
        (idx(IMAGES)[:-1], "truncated: 27 bytes, but its header announces 28"),
        (idx(IMAGES) + b"x", "too long: 29 bytes"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-12], "truncated or damaged gzip"),
    ],
)
def test_damaged_idx_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_idx(path)


def test_images_are_not_labels(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(IMAGES))
    with pytest.raises(UserError, match="wrong magic number: 3 axes of uint8, but labels have 1"):
        read_idx_labels(path, 10)
    path.write_bytes(idx(np.array([1, 2], dtype=np.uint8)))
    with pytest.raises(UserError, match="wrong magic number: 1 axes of uint8, but images have 3"):
        read_idx_images(path)


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(idx(np.array([1, 26, 27], dtype=np.uint8)))
    assert read_idx_labels(path, 27, first_label=1).tolist() == [0, 25, 26]
    with pytest.raises(UserError, match=r"1 labels are not among the 26 classes\. The first is 26"):
        read_idx_labels(path, 26, first_label=1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: cannot be read: No such file"):
        read_idx(tmp_path / "absent")


def test_cifar_samples_are_labels_then_planes(tmp_path: Path) -> None:
    pixels = np.arange(3 * 1024, dtype=np.uint32).astype(np.uint8)
    path = tmp_path / "batch.bin"
    path.write_bytes(bytes([7]) + pixels.tobytes() + bytes([9]) + pixels[::-1].tobytes())
    x, y = read_cifar([path, path], 10)
    assert x.shape == (4, 3, 32, 32)
    assert y.tolist() == [7, 9, 7, 9]
    assert x[0, 1, 0, 5] == pixels[1024 + 5]
    assert x[1, 0, 0, 0] == pixels[-1]


def test_cifar_100_takes_the_fine_label(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(bytes([3, 99]) + bytes(3072))
    assert read_cifar([path], 100, label_bytes=2)[1].tolist() == [99]


def test_damaged_cifar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch.bin"
    path.write_bytes(bytes(3072))
    with pytest.raises(UserError, match="truncated: 3072 bytes are not a multiple of 3073"):
        read_cifar([path], 10)
    path.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(UserError, match=r"1 labels are not among the 10 classes\. The first is 10"):
        read_cifar([path], 10)


def test_svhn_calls_zero_ten(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    x = np.zeros((32, 32, 3, 2), dtype=np.uint8)
    x[4, 5, 2, 1] = 200
    savemat(path, {"X": x, "y": np.array([[10], [3]], dtype=np.uint8)})
    images, labels = read_svhn(path)
    assert labels.tolist() == [0, 3]
    assert images.shape == (2, 3, 32, 32)
    assert images[1, 2, 4, 5] == 200


def test_damaged_svhn_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    x = np.zeros((32, 32, 3, 2), dtype=np.uint8)
    for compress in (False, True):
        savemat(path, {"X": x, "y": np.array([[10], [3]], dtype=np.uint8)}, do_compression=compress)
        content = path.read_bytes()
        for length in (0, 60, 150, len(content) // 2, len(content) - 3):
            path.write_bytes(content[:length])
            with pytest.raises(UserError, match="truncated"):
                read_svhn(path)
    savemat(path, {"X": x, "y": np.array([[11], [3]], dtype=np.uint8)})
    with pytest.raises(UserError, match=r"1 labels are not among the 10 classes\. The first is 11"):
        read_svhn(path)
    savemat(path, {"X": x[:16], "y": np.array([[1], [3]], dtype=np.uint8)})
    with pytest.raises(UserError, match=r"X has shape \(16, 32, 3, 2\)"):
        read_svhn(path)
