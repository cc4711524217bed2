"""From raw arrays to what a model is given: numbered labels, standardised features, a test part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import UserError

_BLOCK_ROWS = 4096
_MAX_EXACT_INTEGER = 2**53  # beyond this, neighbouring whole numbers are the same float


def stratified_mask(y: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.bool_]:
    """A mask over `count` rows in which every class keeps its share.

    Not scikit-learn's: that one refuses a class of a single row, which users' files do have.
    """
    order = np.lexsort((np.random.default_rng(seed).random(len(y)), y))
    sizes = np.bincount(y)
    rank = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    depth = np.empty(len(y))
    depth[order] = (rank + 0.5) / np.repeat(sizes, sizes)
    mask = np.zeros(len(y), dtype=bool)
    mask[np.argsort(depth, kind="stable")[:num_samples]] = True
    return mask


def proportional_mask(y: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.bool_]:
    """A mask over `count` rows with every class in its share, by largest remainders; where there are fewer rows than
    classes, no class has two."""
    rng = np.random.default_rng(seed)
    sizes = np.bincount(y)
    weights = sizes if num_samples >= np.count_nonzero(sizes) else np.minimum(sizes, 1)
    counts, remainders = np.divmod(num_samples * weights, weights.sum())
    largest = np.lexsort((rng.random(len(sizes)), -remainders))
    counts[largest[: num_samples - counts.sum()]] += 1
    order = np.lexsort((rng.random(len(y)), y))
    rank = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(len(y), dtype=bool)
    mask[order[rank < np.repeat(counts, sizes)]] = True
    return mask


def held_out_mask(y: NDArray[np.int64], test_fraction: float, seed: int) -> NDArray[np.bool_]:
    """A mask over the rows to test on: at least one, and at least one is left to train on."""
    if not 0 < test_fraction < 1:
        raise UserError(f"test_share is {test_fraction}, but it must lie between 0 and 1")
    if len(y) < 2:
        raise UserError(f"{len(y)} row(s) cannot be cut into a training and a test part: at least 2 are needed")
    return stratified_mask(y, min(max(1, round(test_fraction * len(y))), len(y) - 1), seed)


def normalise_labels(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """Labels of one sortable type; whole numbers may come as floats."""
    if labels.ndim != 1:
        raise UserError(f"{where}: labels have shape {labels.shape}, but there must be one label per row")
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise UserError(f"{where}: {int((~np.isfinite(labels)).sum())} labels are missing or NaN")
        if (labels != np.round(labels)).any():
            first = labels[labels != np.round(labels)][0]
            raise UserError(f"{where}: label {first} is not a class: labels must be whole numbers or text")
        if (np.abs(labels) > _MAX_EXACT_INTEGER).any():
            raise UserError(
                f"{where}: label {labels[np.abs(labels) > _MAX_EXACT_INTEGER][0]:.6g} is too large to be told apart"
            )
        return labels.astype(np.int64)
    if labels.dtype.kind not in "iubUS":
        raise UserError(f"{where}: labels are of type {labels.dtype}, but must be whole numbers or text")
    if labels.dtype.kind in "US":
        labels = labels.astype(np.str_)
        empty = int((np.char.strip(labels) == "").sum())
        if empty:
            raise UserError(f"{where}: {empty} rows have an empty label")
    return labels


def encode_labels(labels: NDArray[Any], classes: NDArray[Any], where: str) -> NDArray[np.int64]:
    """The position of each label in the sorted `classes`."""
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise UserError(f"{where}: label {str(unknown[0])!r} does not occur in the training part")
    return np.searchsorted(classes, labels).astype(np.int64)


def channel_moments(x: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of each column of a table, or of each channel of images [N, C, H, W]."""
    axes = (0, *range(2, x.ndim))
    mean = x.mean(axis=axes, dtype=np.float64)
    squares = np.zeros_like(mean)
    shape = (-1, *[1] * (x.ndim - 2))
    for start in range(0, len(x), _BLOCK_ROWS):
        squares += ((x[start : start + _BLOCK_ROWS] - mean.reshape(shape)) ** 2).sum(axis=axes)
    std = np.sqrt(squares / (x.size / len(mean)))
    constant = x.min(axis=axes) == x.max(axis=axes)
    return mean, np.where(constant, 1.0, std)


@dataclass(frozen=True)
class Preparation:
    """What is done to raw values before a model is given them: (x / scale - mean) / std, for each column or channel.

    A run keeps it, so that whoever asks its models for predictions later can send values as they are.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1.0
    double: bool = False  # whether it is computed in double precision: values of one's own may have large offsets
    white: float | None = None  # the raw value of a white pixel; None where rows are no images, or it is not known
    columns: tuple[str, ...] | None = None  # of a table

    @classmethod
    def from_moments(cls, moments: tuple[NDArray[np.float64], NDArray[np.float64]], **more: Any) -> Preparation:
        mean, std = moments
        return cls(tuple(mean.tolist()), tuple(std.tolist()), **more)

    def __call__(self, x: NDArray[Any]) -> Tensor:
        moments = np.array(self.mean), np.array(self.std)
        return standardise(x, *moments) if self.double else scale_images(x, self.scale, *moments)


def scale_images(images: NDArray[Any], scale: float, mean: NDArray[np.float64], std: NDArray[np.float64]) -> Tensor:
    shape = (1, -1, 1, 1)
    x = torch.from_numpy(images.astype(np.float32)).div_(scale)
    return x.sub_(torch.from_numpy(mean).float().view(shape)).div_(torch.from_numpy(std).float().view(shape))


def standardise(x: NDArray[Any], mean: NDArray[np.float64], std: NDArray[np.float64]) -> Tensor:
    """In double precision, since large offsets (a time stamp) have no digits left in float32."""
    shape = (-1, *[1] * (x.ndim - 2))
    result = np.empty(x.shape, dtype=np.float32)
    for start in range(0, len(x), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        result[block] = (x[block] - mean.reshape(shape)) / std.reshape(shape)
    return torch.from_numpy(result)
