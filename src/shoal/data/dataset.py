"""A data set before it is dealt to clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.data.prepare import Preparation
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.types import Samples

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all


@dataclass(frozen=True)
class ReadOptions:
    """How the user's own file is to be read."""

    label_column: str = "label"
    client_column: str | None = None
    sensitive_column: str | None = None
    edge_column: str | None = None
    drop_columns: tuple[str, ...] = ()
    test_fraction: float = 0.2
    seed: int = 0
    hold_out: HoldOut | None = None  # of the owners of rows


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Samples  # x float32, standardised; y int64 in 0..C-1
    test: Samples
    classes: tuple[str, ...]
    owner: tuple[str, ...] | None = None  # the client that owns training row i
    is_sensitive: Tensor | None = None  # whether training row i is of high sensitivity
    edge: tuple[str, ...] | None = None  # the edge that the client of training row i is under
    note: str = ""
    preparation: Preparation | None = None  # how its rows were prepared; None: they are as they came
    unseen: frozenset[str] = frozenset()  # owners of rows that the test part and the preparation know nothing of

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])


def validate(dataset: Dataset) -> Dataset:
    """The data set itself, once it is known to be fit for training."""
    if len(dataset.classes) < 2:
        raise UserError(f"{dataset.name}: {len(dataset.classes)} class(es), but at least 2 are needed")
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        _validate_part(f"{dataset.name}: the {part} part", examples, len(dataset.classes))
    low, high = dataset.train.x.aminmax()
    if low == high:
        raise UserError(f"{dataset.name}: every feature of the training part is the same number, {low.item():g}")
    if dataset.test.x.shape[1:] != dataset.train.x.shape[1:]:
        raise UserError(
            f"{dataset.name}: the test part has rows of shape {tuple(dataset.test.x.shape[1:])}, "
            f"but the training part has {dataset.input_shape}"
        )
    if dataset.owner is not None and len(dataset.owner) != len(dataset.train.y):
        raise UserError(
            f"{dataset.name}: {len(dataset.owner)} owners for {len(dataset.train.y)} training rows, "
            "but each row needs one"
        )
    return dataset


def _validate_part(where: str, samples: Samples, classes: int) -> None:
    x, y = samples
    if x.numel() == 0:
        raise UserError(f"{where} is empty")
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} rows but {len(y)} labels")
    low, high = x.aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise UserError(f"{where} has {int((~torch.isfinite(x)).sum())} features that are NaN or infinite")
    if y.min() < 0 or y.max() >= classes:
        raise UserError(f"{where} has labels from {y.min()} to {y.max()}, but they must be in 0..{classes - 1}")
