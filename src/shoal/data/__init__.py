"""Data: named sets and the user's own files, dealt to clients."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.data.dataset import Dataset, Options, Progress, validate
from shoal.data.federation import SPLITS, Federation
from shoal.data.heterogeneity import figures
from shoal.data.partitions import check_partition, partition
from shoal.data.prepare import stratified
from shoal.data.sources import Listing, available, get, is_named, load_named, names
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import Examples

__all__ = [
    "SPLITS",
    "Dataset",
    "Federation",
    "Listing",
    "available",
    "check_partition",
    "check_source",
    "figures",
    "get",
    "load",
    "partition",
    "validate",
]


def load(
    source: str,
    *,
    seed: int = 0,
    clients: int | None = None,
    label_column: str = "label",
    client_column: str | None = None,
    sensitive_column: str | None = None,
    edge_column: str | None = None,
    drop_columns: Sequence[str] = (),
    rows: int | None = None,
    unseen: int | float = 0,
    min_size: int = 10,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """A named set, else a path. `rows` keeps a stratified part of the training rows.

    `unseen`: of the owners of a file's rows, of whom `clients` take part and each has `min_size` rows or more, so many
    will be held out (`partition`); the file's test part and the scaling of its columns are then made without them.
    """
    hold_out = HoldOut(unseen, seed, clients, min_size) if unseen else None
    columns = label_column, client_column, sensitive_column, edge_column, tuple(drop_columns)
    options = Options(*columns, seed=seed, hold_out=hold_out)
    dataset = load_named(source, seed=seed, clients=clients, download=download, progress=progress)
    if dataset is None:
        dataset = _own(source, options)
    else:
        _no_columns(source, options)
    return dataset if rows is None else _subsample(dataset, rows, seed)


def check_source(source: str) -> None:
    """Refuses what is neither the name of a set nor a path that exists."""
    path = Path(source).expanduser()
    if is_named(source) or path.exists():
        return
    if path.suffix or "/" in source:
        raise UserError(f"data {source!r} does not exist")
    close = difflib.get_close_matches(source, names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"data {source!r} is neither a file nor a known set; {hint}known are {', '.join(names())}")


def _own(source: str, options: Options) -> Dataset:
    check_source(source)
    path = Path(source).expanduser()
    if path.suffix.lower() not in (".csv", ".parquet"):
        has_arrays = path.suffix.lower() == ".npz"
        allowed = (
            replace(options, client_column=None, sensitive_column=None, edge_column=None) if has_arrays else options
        )
        _no_columns(source, allowed)
    from shoal.data.user_files import read  # slow to import: only for files of one's own

    return read(path, options)


def _no_columns(source: str, options: Options) -> None:
    default = Options()
    for name in ("label_column", "client_column", "sensitive_column", "edge_column", "drop_columns"):
        if getattr(options, name) != getattr(default, name):
            raise UserError(f"{name} is {getattr(options, name)!r}, but {source} is not a table of columns")


def _subsample(dataset: Dataset, rows: int, seed: int) -> Dataset:
    have = len(dataset.train.y)
    if not 1 <= rows <= have:
        raise UserError(f"rows is {rows}, but {dataset.name} has {have} training rows: ask for 1 to {have}")
    if rows == have:
        return dataset
    mask = torch.from_numpy(stratified(dataset.train.y.numpy(), rows, derive_seed(seed, "rows")))
    kept = mask.nonzero().squeeze(1)
    owner = dataset.owner
    note = f"a stratified {rows:,} of {have:,} training rows"
    return replace(
        dataset,
        train=Examples(dataset.train.x[kept], dataset.train.y[kept]),
        owner=None if owner is None else tuple(owner[i] for i in kept.tolist()),
        sensitive=None if dataset.sensitive is None else dataset.sensitive[kept],
        edge=None if dataset.edge is None else tuple(dataset.edge[i] for i in kept.tolist()),
        note="; ".join(part for part in (dataset.note, note) if part),
    )
