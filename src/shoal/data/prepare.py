"""Converts raw arrays to the tensors of a model: numbered labels, standardised features, and a test part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import UserError

_BLOCK_ROWS = 4096
_MAX_EXACT_INTEGER = 2**53  # larger neighbouring whole numbers are the same float


def stratified_mask(y: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.bool_]:
    """Returns a mask of `num_samples` samples in which every class keeps its share.

    scikit-learn's function is not used, because it refuses a class of a single sample, which files of users have.
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
    """Returns a mask of `num_samples` samples in which every class has its share, by largest remainders.

    With fewer samples than classes, no class has two.
    """
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
    """Returns a mask of the test samples: at least one, and at least one sample is left to train on."""
    if not 0 < test_fraction < 1:
        raise UserError(f"test_fraction is {test_fraction}, but it must be between 0 and 1.")
    if len(y) < 2:
        raise UserError(f"{len(y)} sample(s) cannot be divided into a training and a test part: at least 2 are needed.")
    return stratified_mask(y, min(max(1, round(test_fraction * len(y))), len(y) - 1), seed)


def normalise_labels(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """Returns labels of one sortable type. Floats that are whole numbers become integers."""
    if labels.ndim != 1:
        raise UserError(f"{where}: labels have shape {labels.shape}, but there must be one label per sample.")
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise UserError(f"{where}: {int((~np.isfinite(labels)).sum())} labels are missing or NaN.")
        if (labels != np.round(labels)).any():
            first_fraction = labels[labels != np.round(labels)][0]
            raise UserError(f"{where}: label {first_fraction} is not a class: labels must be whole numbers or text.")
        too_large = labels[np.abs(labels) > _MAX_EXACT_INTEGER]
        if len(too_large):
            raise UserError(
                f"{where}: label {too_large[0]:.6g} is too large to be exact: use smaller whole numbers or text."
            )
        return labels.astype(np.int64)
    if labels.dtype.kind not in "iubUS":
        raise UserError(f"{where}: labels are of type {labels.dtype}, but they must be whole numbers or text.")
    if labels.dtype.kind in "US":
        labels = labels.astype(np.str_)
        num_empty = int((np.char.strip(labels) == "").sum())
        if num_empty:
            raise UserError(f"{where}: {num_empty} samples have an empty label.")
    return labels


def encode_labels(labels: NDArray[Any], classes: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Returns the index of each label in the sorted `classes`."""
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        raise UserError(f"{where}: label {str(unknown[0])!r} does not occur in the training part.")
    return np.searchsorted(classes, labels).astype(np.int64)


def channel_moments(x: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns mean and standard deviation of each column of a table, or of each channel of images [N, C, H, W]."""
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
    """The scaling of raw values for a model: (x / scale - mean) / std, for each column or channel.

    A run stores it, so that its models can predict from raw values later.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1.0
    double: bool = False  # whether to compute in double precision, because values of a user may have large offsets
    white: float | None = None  # the raw value of a white pixel; None for a table, or if it is unknown
    columns: tuple[str, ...] | None = None  # names of the columns of a table

    @classmethod
    def from_moments(cls, moments: tuple[NDArray[np.float64], NDArray[np.float64]], **others: Any) -> Preparation:
        """Creates a preparation from means and standard deviations, and other fields by name."""
        mean, std = moments
        return cls(tuple(mean.tolist()), tuple(std.tolist()), **others)

    def __call__(self, x: NDArray[Any]) -> Tensor:
        """Returns raw values as the inputs of a model."""
        moments = np.array(self.mean), np.array(self.std)
        return standardise(x, *moments) if self.double else scale_images(x, self.scale, *moments)


def scale_images(images: NDArray[Any], scale: float, mean: NDArray[np.float64], std: NDArray[np.float64]) -> Tensor:
    """Returns images as standardised float32, computed in float32."""
    shape = (1, -1, 1, 1)
    x = torch.from_numpy(images.astype(np.float32)).div_(scale)
    return x.sub_(torch.from_numpy(mean).float().view(shape)).div_(torch.from_numpy(std).float().view(shape))


def standardise(x: NDArray[Any], mean: NDArray[np.float64], std: NDArray[np.float64]) -> Tensor:
    """Returns values as standardised float32, computed in float64 because float32 loses digits of large offsets."""
    shape = (-1, *[1] * (x.ndim - 2))
    result = np.empty(x.shape, dtype=np.float32)
    for start in range(0, len(x), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        result[block] = (x[block] - mean.reshape(shape)) / std.reshape(shape)
    return torch.from_numpy(result)
