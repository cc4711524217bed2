"""Reduces the class counts of a large fleet to a size that can be drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bins:
    """Numbers of samples by client and class, where neighbouring clients and classes may have been added up."""

    rows: list[str]  # the name of one client, or "first … last" for clients that were added up
    columns: list[str]  # the same for classes
    counts: np.ndarray  # int64, rows × columns
    clients_per_row: int
    classes_per_column: int


def bin_counts(partition: Mapping[str, Any], max_rows: int, max_columns: int | None = None) -> Bins:
    """Returns the counts of a partition in at most this many rows (clients) and columns (classes)."""
    clients = [str(c) for c in partition["clients"]]
    classes = [str(c) for c in partition["classes"]]
    counts = np.asarray(partition["counts"], dtype=np.int64).reshape(len(clients), len(classes))
    clients_per_row = max(1, math.ceil(len(clients) / max_rows))
    classes_per_column = max(1, math.ceil(len(classes) / (max_columns or max(1, len(classes)))))
    if counts.size:
        counts = np.add.reduceat(counts, range(0, len(clients), clients_per_row), axis=0)
        counts = np.add.reduceat(counts, range(0, len(classes), classes_per_column), axis=1)
    return Bins(
        _ranges(clients, clients_per_row),
        _ranges(classes, classes_per_column),
        counts,
        clients_per_row,
        classes_per_column,
    )


def _ranges(names: Sequence[str], size: int) -> list[str]:
    ranges = [names[i : i + size] for i in range(0, len(names), size)]
    return [r[0] if len(r) == 1 else f"{r[0]} … {r[-1]}" for r in ranges]
