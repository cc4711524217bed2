"""Reads the file formats of published image data sets: idx, CIFAR binary, and SVHN .mat. Pixels stay bytes."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.limits import allowed_bytes, check_memory
from shoal.errors import UserError

_GZIP_MAGIC = b"\x1f\x8b"
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CIFAR_PIXELS = 3 * 32 * 32


def read_idx(path: Path) -> NDArray[Any]:
    """Reads an idx file of any shape and number type, gzipped or not."""
    content = _read_content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise UserError(f"{path}: not an idx file: it begins with {content[:4].hex() or 'nothing'}, not 0000TTDD.")
    dtype, axes = np.dtype(_IDX_TYPES[content[2]]), content[3]
    header = 4 + 4 * axes
    if len(content) < header:
        raise UserError(f"{path}: truncated: {len(content)} bytes, but its header alone has {header}.")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", axes, offset=4))
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise UserError(f"{path}: {state}: {len(content)} bytes, but its header announces {expected}.")
    return np.frombuffer(content, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def read_idx_images(path: Path) -> NDArray[np.uint8]:
    """Reads an idx file of images as [N, 1, H, W]."""
    images = read_idx(path)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise UserError(
            f"{path}: wrong magic number: {images.ndim} axes of {images.dtype}, but images have 3 of uint8."
        )
    return images[:, None]


def read_idx_labels(path: Path, num_classes: int, first_label: int = 0) -> NDArray[np.int64]:
    """Reads an idx file of labels, of which the first class has number `first_label` in the file."""
    labels = read_idx(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(
            f"{path}: wrong magic number: {labels.ndim} axes of {labels.dtype}, but labels have 1 of uint8."
        )
    return check_labels(path, labels.astype(np.int64) - first_label, num_classes)


def read_cifar(
    paths: Sequence[Path], num_classes: int, label_bytes: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads samples of `label_bytes` labels, of which the last one is used, and 3 planes of 32 x 32 pixels."""
    sample_bytes = label_bytes + _CIFAR_PIXELS
    parts = []
    for path in paths:
        content = np.frombuffer(_read_content(path), np.uint8)
        if len(content) == 0 or len(content) % sample_bytes:
            raise UserError(
                f"{path}: truncated: {len(content)} bytes are not a multiple of {sample_bytes}, one sample."
            )
        samples = content.reshape(-1, sample_bytes)
        check_labels(path, samples[:, label_bytes - 1].astype(np.int64), num_classes)
        parts.append(samples)
    samples = np.concatenate(parts)
    return samples[:, label_bytes:].reshape(-1, 3, 32, 32), samples[:, label_bytes - 1].astype(np.int64)


def read_svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads cropped digits: X [32, 32, 3, N], and y, in which 10 is the digit 0."""
    from scipy.io import loadmat  # slow to import

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # SciPy raises errors of many kinds for damaged files
        raise UserError(f"{path}: truncated or not a MATLAB 5 file: {error}.") from error
    if "X" not in content or "y" not in content:
        raise UserError(f"{path}: truncated or not SVHN: it does not have both variables X and y.")
    images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise UserError(
            f"{path}: X has shape {images.shape} of {images.dtype}, but must be (32, 32, 3, {len(labels)}) of uint8."
        )
    labels = check_labels(path, np.where(labels == 10, 0, labels), 10)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels


def check_labels(path: Path, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Returns the labels, or raises a UserError if one is not a class."""
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise UserError(
            f"{path}: {len(outside)} labels are not among the {num_classes} classes. The first is {outside[0]}."
        )
    return labels


def _read_content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if content[:2] != _GZIP_MAGIC:
            return content
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(allowed_bytes(len(content)) + 1)
        check_memory(path, len(unpacked), len(content))
        return unpacked
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated or damaged gzip file: {error}.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
