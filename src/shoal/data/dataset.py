"""A data set before its samples are assigned to clients, which `partitions.py` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.data.prepare import Preparation
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.types import Samples

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if known


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a file of the user."""

    label_column: str = "label"
    client_column: str | None = None
    sensitive_column: str | None = None
    edge_column: str | None = None
    drop_columns: tuple[str, ...] = ()
    test_fraction: float = 0.2
    seed: int = 0
    hold_out: HoldOut | None = None  # choice of unseen clients among the owners of samples


@dataclass(frozen=True)
class Dataset:
    """The training and test samples of a data set.

    Parameters
    ----------
    name : str
        Name of the data set.
    train, test : Samples
        Inputs as standardised float32, and labels as int64 in 0..C-1.
    classes : tuple of str
        Names of the C classes.
    owner : tuple of str, or None
        The client that owns each training sample.
    is_sensitive : Tensor or None
        Whether each training sample has high sensitivity.
    edge : tuple of str, or None
        The edge server of each training sample's client.
    note : str
        Remarks for the user.
    preparation : Preparation or None
        How raw values were scaled; None if they were not.
    unseen : frozenset of str
        Owners whose samples were used neither for the test part nor for the scaling.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    owner: tuple[str, ...] | None = None
    is_sensitive: Tensor | None = None
    edge: tuple[str, ...] | None = None
    note: str = ""
    preparation: Preparation | None = None
    unseen: frozenset[str] = frozenset()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.x.shape[1:])


def validate(dataset: Dataset) -> Dataset:
    """Returns the data set, or raises a UserError if it cannot be used for training."""
    if len(dataset.classes) < 2:
        raise UserError(f"{dataset.name}: {len(dataset.classes)} class(es), but at least 2 are needed.")
    for part, samples in (("training", dataset.train), ("test", dataset.test)):
        _validate_part(f"{dataset.name}: the {part} part", samples, len(dataset.classes))
    low, high = dataset.train.x.aminmax()
    if low == high:
        raise UserError(f"{dataset.name}: every feature of the training part is the same number, {low.item():g}.")
    if dataset.test.x.shape[1:] != dataset.train.x.shape[1:]:
        raise UserError(
            f"{dataset.name}: the test part has samples of shape {tuple(dataset.test.x.shape[1:])}, "
            f"but the training part has {dataset.input_shape}."
        )
    if dataset.owner is not None and len(dataset.owner) != len(dataset.train.y):
        raise UserError(
            f"{dataset.name}: {len(dataset.owner)} owners for {len(dataset.train.y)} training samples, "
            "but each sample needs one."
        )
    return dataset


def _validate_part(where: str, samples: Samples, num_classes: int) -> None:
    x, y = samples
    if x.numel() == 0:
        raise UserError(f"{where} is empty.")
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} samples but {len(y)} labels.")
    low, high = x.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise UserError(f"{where} has {int((~torch.isfinite(x)).sum())} features that are NaN or infinite.")
    if y.min() < 0 or y.max() >= num_classes:
        raise UserError(f"{where} has labels from {y.min()} to {y.max()}, but they must be in 0..{num_classes - 1}.")
