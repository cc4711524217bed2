"""Data: published sets and the user's own files, and their partition into clients.

`load` reads a data set (`sources.py`, `user_files.py`), and `partition` divides it (`partitions.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shoal.data.dataset import Dataset, Progress, ReadOptions, validate
from shoal.data.federation import SPLITS, Federation
from shoal.data.heterogeneity import heterogeneity_metrics
from shoal.data.partitions import check_partition, partition
from shoal.data.prepare import stratified_mask
from shoal.data.sources import Listing, dataset_names, get_folder, is_named, list_datasets, load_named
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import Samples

__all__ = [
    "SPLITS",
    "Dataset",
    "Federation",
    "Listing",
    "check_partition",
    "check_source",
    "get_folder",
    "heterogeneity_metrics",
    "list_datasets",
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
    max_train_samples: int | None = None,
    unseen: int | float = 0,
    min_samples: int = 10,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Loads a data set.

    Parameters
    ----------
    source : str
        Name of a data set, or path of a file or of a folder of images.
    seed : int
        Seed of all random choices.
    clients : int or None
        Number of clients, for synthetic data and for `unseen`. None: 100 for synthetic data, and all owners of a file.
    label_column, client_column, sensitive_column, edge_column : str or None
        Columns of a table with the labels, the clients, the sensitivity of samples, and the edges of clients.
    drop_columns : Sequence[str]
        Columns of a table that are not used.
    max_train_samples : int or None
        Size of a stratified part of the training samples that is used. None: all of them.
    unseen : int or float
        Number or fraction of the clients that `partition` will hold out. The test part of a file and the scaling of its
        columns are then computed without the samples of these clients.
    min_samples : int
        Samples that a client must have to be held out.
    download : bool
        Download a published set that is not on this machine.
    progress : callable or None
        Called with the name of the file, the bytes so far, and the bytes in all while a file is downloaded.

    Returns
    -------
    Dataset
        The data set.

    Raises
    ------
    UserError
        If the source is unknown or unsuitable, or an option does not fit it.
    """
    hold_out = HoldOut(unseen, seed, clients, min_samples) if unseen else None
    columns = label_column, client_column, sensitive_column, edge_column, tuple(drop_columns)
    options = ReadOptions(*columns, seed=seed, hold_out=hold_out)
    dataset = load_named(source, seed=seed, clients=clients, download=download, progress=progress)
    if dataset is None:
        dataset = _load_user_file(source, options)
    else:
        _refuse_column_options(source, options)
    return dataset if max_train_samples is None else _keep_samples(dataset, max_train_samples, seed)


def check_source(source: str) -> None:
    """Raises a UserError if the source is neither the name of a set nor an existing path."""
    path = Path(source).expanduser()
    if is_named(source) or path.exists():
        return
    if path.suffix or "/" in source:
        raise UserError(f"data {source!r} does not exist.")
    close = difflib.get_close_matches(source, dataset_names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"data {source!r} is neither a file nor a known set; {hint}known are {', '.join(dataset_names())}.")


def _load_user_file(source: str, options: ReadOptions) -> Dataset:
    check_source(source)
    path = Path(source).expanduser()
    if path.suffix.lower() not in (".csv", ".parquet"):
        has_arrays = path.suffix.lower() == ".npz"
        allowed = (
            replace(options, client_column=None, sensitive_column=None, edge_column=None) if has_arrays else options
        )
        _refuse_column_options(source, allowed)
    from shoal.data.user_files import read_user_file  # slow to import: only for files of one's own

    return read_user_file(path, options)


def _refuse_column_options(source: str, options: ReadOptions) -> None:
    default = ReadOptions()
    for name in ("label_column", "client_column", "sensitive_column", "edge_column", "drop_columns"):
        if getattr(options, name) != getattr(default, name):
            raise UserError(f"{name} is {getattr(options, name)!r}, but {source} is not a table of columns.")


def _keep_samples(dataset: Dataset, max_train_samples: int, seed: int) -> Dataset:
    num_available = len(dataset.train.y)
    if not 1 <= max_train_samples <= num_available:
        raise UserError(
            f"max_train_samples is {max_train_samples}, but {dataset.name} has {num_available} training samples. "
            f"Ask for 1 to {num_available}."
        )
    if max_train_samples == num_available:
        return dataset
    mask = torch.from_numpy(stratified_mask(dataset.train.y.numpy(), max_train_samples, derive_seed(seed, "rows")))
    kept_indices = mask.nonzero().squeeze(1)
    owner = dataset.owner
    note = f"a stratified {max_train_samples:,} of {num_available:,} training samples"
    return replace(
        dataset,
        train=Samples(dataset.train.x[kept_indices], dataset.train.y[kept_indices]),
        owner=None if owner is None else tuple(owner[i] for i in kept_indices.tolist()),
        is_sensitive=None if dataset.is_sensitive is None else dataset.is_sensitive[kept_indices],
        edge=None if dataset.edge is None else tuple(dataset.edge[i] for i in kept_indices.tolist()),
        note="; ".join(part for part in (dataset.note, note) if part),
    )
