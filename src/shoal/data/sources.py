"""The named data sets: built in (digits, synthetic, sensors), or published (`catalogue.py`).

A published set is read from a folder of this machine, or downloaded (`download.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.archives import unpack
from shoal.data.catalogue import SOURCES, RemoteFile, Source, find_file
from shoal.data.dataset import Dataset, Progress, validate
from shoal.data.prepare import Preparation, channel_moments, held_out_mask
from shoal.data.sensors import DEFAULT_ACTIVITIES, LENGTH, NUM_CHANNELS, parse_sensors
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import Samples

_FEATURES, _CLASSES = 60, 10  # of synthetic(α, β)
_DEFAULT_NUM_CLIENTS = 100
_TEST_FRACTION = 0.2


def load_named(
    name: str, *, seed: int, clients: int | None, download: bool, progress: Progress | None
) -> Dataset | None:
    """Loads a named data set, or returns None if no set has this name.

    `clients` is the number of clients of synthetic data. The other parameters are those of `shoal.load`.
    """
    if name == "digits":
        return validate(build_digits(seed))
    if name.partition(":")[0] == "synthetic":
        return validate(_parse_synthetic(name, _DEFAULT_NUM_CLIENTS if clients is None else clients, seed))
    if name.partition(":")[0] == "sensors":
        return validate(parse_sensors(name, seed))
    if name in SOURCES:
        return validate(_load_published(SOURCES[name], download, progress))
    return None


def is_named(name: str) -> bool:
    """Returns whether a data set has this name."""
    return name in ("digits", *SOURCES) or name.partition(":")[0] in ("synthetic", "sensors")


def dataset_names() -> tuple[str, ...]:
    """Returns the names of all data sets."""
    return ("digits", "synthetic:ALPHA,BETA", "sensors", *SOURCES)


def build_digits(seed: int) -> Dataset:
    """Returns the 8 x 8 grey images of scikit-learn. The set has no published test part, so a part is held out."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    x = bunch.images[:, None].astype(np.float32)
    y = bunch.target.astype(np.int64)
    test = held_out_mask(y, _TEST_FRACTION, derive_seed(seed, "digits", "test"))
    preparation = Preparation.from_moments(channel_moments(x[~test]), white=16.0)
    return Dataset(
        name="digits",
        train=Samples(preparation(x[~test]), torch.from_numpy(y[~test])),
        test=Samples(preparation(x[test]), torch.from_numpy(y[test])),
        classes=tuple(str(c) for c in range(10)),
        preparation=preparation,
    )


def _parse_synthetic(name: str, clients: int, seed: int) -> Dataset:
    """Reads `synthetic:ALPHA,BETA`, or with bounds on a client's samples `synthetic:ALPHA,BETA,MIN,MAX`."""
    form = "synthetic:ALPHA,BETA or synthetic:ALPHA,BETA,MIN,MAX (samples per client), as in synthetic:1,1,20,100"
    try:
        numbers = [float(part) for part in name.partition(":")[2].split(",")]
    except ValueError as error:
        raise UserError(f"data {name!r} is not of the form {form}.") from error
    if len(numbers) not in (2, 4) or not all(np.isfinite(numbers)):
        raise UserError(f"data {name!r} is not of the form {form}.")
    bounds = [int(number) for number in numbers[2:]] or [50, 1000]
    dataset = draw_synthetic(numbers[0], numbers[1], clients, seed, min_samples=bounds[0], max_samples=bounds[1])
    return replace(dataset, name=name)


def draw_synthetic(
    alpha: float, beta: float, clients: int, seed: int, *, min_samples: int = 50, max_samples: int = 1000
) -> Dataset:
    """Draws synthetic(α, β) of Li et al. (FedProx).

    For client k: u_k ~ N(0, α), B_k ~ N(0, β), W_k and b_k ~ N(u_k, 1), v_k ~ N(B_k, 1), x ~ N(v_k, Σ) with
    Σ_jj = j^-1.2, and y = argmax(x W_k + b_k). α and β are standard deviations, as in the authors' program.
    Features are not rescaled, because the set would then no longer be the published one.

    Parameters
    ----------
    alpha : float
        How much the models of clients differ (α).
    beta : float
        How much the features of clients differ (β).
    clients : int
        Number of clients.
    seed : int
        Seed of the draws.
    min_samples, max_samples : int
        Bounds on the training samples of a client.

    Returns
    -------
    Dataset
        The data set, in which every training sample has an owner.

    Raises
    ------
    UserError
        If a parameter is out of its range.
    """
    if alpha < 0 or beta < 0:
        raise UserError(f"synthetic:{alpha:g},{beta:g}: ALPHA and BETA must not be below 0, as in synthetic:1,1.")
    if clients < 1:
        raise UserError(f"clients is {clients}, but it must be at least 1.")
    if not 1 <= min_samples <= max_samples:
        raise UserError(f"samples per client {min_samples}..{max_samples}: MIN must be at least 1 and at most MAX.")
    rng = np.random.default_rng(derive_seed(seed, "synthetic"))
    sizes = np.minimum(rng.lognormal(4.0, 2.0, clients), max_samples - min_samples).astype(np.int64) + min_samples
    models = _SyntheticModels(alpha, beta, clients, rng)
    train = models.draw_samples(sizes, rng)
    width = len(str(clients - 1))
    owners = np.array([f"c{k:0{width}d}" for k in range(clients)], dtype=object)
    return Dataset(
        name=f"synthetic:{alpha:g},{beta:g}",
        train=train,
        test=models.draw_samples(np.maximum(1, sizes // 10), rng),
        classes=tuple(str(c) for c in range(_CLASSES)),
        owner=tuple(owners[np.repeat(np.arange(clients), sizes)].tolist()),
    )


class _SyntheticModels:
    """The distributions from which the features and labels of each client are drawn."""

    def __init__(self, alpha: float, beta: float, clients: int, rng: np.random.Generator) -> None:
        def normal(*shape: int) -> NDArray[np.float32]:
            return rng.standard_normal(shape, dtype=np.float32)

        u = normal(clients, 1) * np.float32(alpha)
        self.centre = normal(clients, 1) * np.float32(beta) + normal(clients, _FEATURES)
        self.weights = normal(clients, _FEATURES, _CLASSES) + u[:, :, None]
        self.bias = normal(clients, _CLASSES) + u

    def draw_samples(self, sizes: NDArray[np.int64], rng: np.random.Generator) -> Samples:
        """Returns `sizes[k]` samples of client k, client after client."""
        x = rng.standard_normal((int(sizes.sum()), _FEATURES), dtype=np.float32)
        x *= np.arange(1, _FEATURES + 1, dtype=np.float32) ** np.float32(-0.6)  # the square root of Σ
        y = np.empty(len(x), dtype=np.int64)
        ends = np.cumsum(sizes).tolist()
        for k, (start, end) in enumerate(pairwise([0, *ends])):
            x[start:end] += self.centre[k]
            y[start:end] = (x[start:end] @ self.weights[k] + self.bias[k]).argmax(axis=1)
        return Samples(torch.from_numpy(x), torch.from_numpy(y))


def _load_published(source: Source, download: bool, progress: Progress | None) -> Dataset:
    folder = find_folder(source)
    if folder is None:
        if not download:
            raise UserError(f"{source.name} is not on this machine. {_download_hint(source)}")
        folder = _download(source, progress)
    pixels = source.read_folder(folder)
    scale = 255.0
    if source.moments is None:
        mean, std = channel_moments(pixels.train_x)
        moments = (mean / scale, std / scale)
    else:
        moments = (np.array(source.moments[0]), np.array(source.moments[1]))
    preparation = Preparation.from_moments(moments, scale=scale, white=scale)
    return Dataset(
        name=source.name,
        train=Samples(preparation(pixels.train_x), torch.from_numpy(pixels.train_y)),
        test=Samples(preparation(pixels.test_x), torch.from_numpy(pixels.test_y)),
        classes=source.classes,
        owner=pixels.owner,
        note=_missing_samples_note(source, len(pixels.train_y), len(pixels.test_y)),
        preparation=preparation,
    )


def _missing_samples_note(source: Source, num_train: int, num_test: int) -> str:
    parts = ((num_train, source.num_samples[0], "training"), (num_test, source.num_samples[1], "test"))
    return "; ".join(f"{n:,} of {expected:,} {part} samples" for n, expected, part in parts if n != expected)


def cache_folder() -> Path:
    """Returns the folder of downloaded data sets, which XDG_CACHE_HOME can change."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def find_folder(source: Source) -> Path | None:
    """Returns the first folder that has all files of the set: the user's, the system's, or the cache's, or None."""
    user_folder = os.environ.get("SHOAL_DATA")
    roots = ([Path(user_folder) / source.folder] if user_folder else []) + [
        *source.system_folders,
        cache_folder() / source.folder,
    ]
    for root in roots:
        for folder in (root, root / source.subfolder):
            if all(find_file(folder, file) for file in source.files):
                return folder
    return None


def get_folder(name: str, progress: Progress | None = None) -> Path:
    """Returns the folder of a published set, and downloads the set if it is not on this machine.

    Files that are missing in the cache are downloaded too, so that a set without its optional files gets them.
    """
    if name not in SOURCES:
        raise UserError(f"data {name!r} cannot be downloaded. The sets to download are {', '.join(SOURCES)}.")
    source = SOURCES[name]
    folder = find_folder(source)
    if folder is None or folder == cache_folder() / source.folder:
        return _download(source, progress)
    return folder


def _download(source: Source, progress: Progress | None) -> Path:
    folder = cache_folder() / source.folder
    for remote in source.remote_files:
        _download_one(remote, folder, source.subfolder, progress)
    return folder / source.subfolder


def _download_one(remote: RemoteFile, folder: Path, subfolder: str, progress: Progress | None) -> None:
    path = folder / remote.file_name
    if not path.exists():
        from shoal.data.download import fetch  # slow to import: most runs download nothing

        fetch(remote.url, path, remote.sha256, remote.size_bytes, progress)
    if remote.members:
        unpack(path, remote.members, folder / subfolder)
        path.unlink()


def _download_hint(source: Source) -> str:
    return (
        f"Run `shoal data get {source.name}` ({source.size_bytes / 1e6:,.0f} MB), or put "
        f"{', '.join(source.files)} into the folder {source.folder} of the directory that SHOAL_DATA names."
    )


@dataclass(frozen=True)
class Listing:
    """One line of `shoal data list`."""

    name: str
    num_samples: tuple[int, int] | None  # training and test; None if they are drawn with the data
    num_classes: int
    shape: tuple[int, ...]
    where: str
    licence: str
    homepage: str


def list_datasets() -> list[Listing]:
    """Returns a line for every named data set."""
    built_in = [
        Listing(
            *("digits", (1438, 359), 10, (1, 8, 8), "built in"),
            *("CC BY 4.0", "https://archive.ics.uci.edu/dataset/80"),
        ),
        Listing(
            *("synthetic:ALPHA,BETA", None, _CLASSES, (_FEATURES,), "built in"),
            *("generated", "https://arxiv.org/abs/1812.06127"),
        ),
        Listing("sensors", None, DEFAULT_ACTIVITIES, (NUM_CHANNELS, LENGTH), "built in", "generated", ""),
    ]
    return built_in + [_listing(source) for source in SOURCES.values()]


def _listing(source: Source) -> Listing:
    folder = find_folder(source)
    where = str(folder) if folder else f"download, {source.size_bytes / 1e6:,.0f} MB"
    return Listing(
        *(source.name, source.num_samples, len(source.classes), source.shape, where, source.licence, source.homepage)
    )
