"""The published data sets: their files, addresses, checksums and readers. `sources.py` finds and loads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.readers import read_cifar, read_idx, read_idx_images, read_idx_labels, read_svhn
from shoal.errors import UserError


class Pixels(NamedTuple):
    """Images as bytes [N, C, H, W] with their labels, and the owner of each training sample if it is known."""

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int64]
    owner: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RemoteFile:
    """A file to download."""

    url: str
    sha256: str
    size_bytes: int
    members: tuple[str, ...] = ()  # files of an archive that are unpacked into the set's subfolder

    @property
    def file_name(self) -> str:
        """The name of the file without its address."""
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Source:
    """A published data set."""

    name: str
    folder: str  # in the folder that SHOAL_DATA names, and in the cache
    files: tuple[str, ...]  # a folder without one of these files does not have the set
    remote_files: tuple[RemoteFile, ...]
    read_folder: Callable[[Path], Pixels]
    num_samples: tuple[int, int]  # published numbers of training and test samples
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    licence: str
    homepage: str
    subfolder: str = ""  # created by the published archive
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = (
        None  # mean and standard deviation; None: computed from the training part
    )
    system_folders: tuple[Path, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """The bytes of all files to download."""
        return sum(remote.size_bytes for remote in self.remote_files)


def find_file(folder: Path, file: str) -> Path | None:
    """Returns the path of the file in `folder`, gzipped or not, or None."""
    candidates = (folder / file, folder / file.removesuffix(".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _require_file(folder: Path, file: str) -> Path:
    path = find_file(folder, file)
    if path is None:
        raise UserError(f"{folder / file}: no such file.")
    return path


def _read_idx_set(
    folder: Path, train: str, test: str, classes: int, first_label: int = 0, is_transposed: bool = False
) -> Pixels:
    def part(prefix: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        images = read_idx_images(_require_file(folder, f"{prefix}-images-idx3-ubyte.gz"))
        labels = read_idx_labels(_require_file(folder, f"{prefix}-labels-idx1-ubyte.gz"), classes, first_label)
        if len(images) != len(labels):
            raise UserError(f"{folder}: {len(images)} images but {len(labels)} labels for {prefix}.")
        return images.transpose(0, 1, 3, 2) if is_transposed else images, labels

    return Pixels(*part(train), *part(test))


_QMNIST_TRAIN = "qmnist-train-labels-idx2-int.gz"


def _read_mnist(folder: Path) -> Pixels:
    pixels = _read_idx_set(folder, "train", "t10k", 10)
    path = find_file(folder, _QMNIST_TRAIN)
    if path is None:
        return pixels
    table = read_idx(path)
    if table.ndim != 2 or table.shape[1] < 3 or not np.array_equal(table[:, 0], pixels.train_y):
        raise UserError(
            f"{path}: column 0 differs from the training labels of {folder}, so that the writers of images are unknown."
        )
    return pixels._replace(owner=tuple(f"w{writer:04d}" for writer in table[:, 2].tolist()))


def _read_cifar10(folder: Path) -> Pixels:
    train = [folder / f"data_batch_{i}.bin" for i in range(1, 6)]
    return Pixels(*read_cifar(train, 10), *read_cifar([folder / "test_batch.bin"], 10))


def _read_cifar100(folder: Path) -> Pixels:
    """Reads samples that have a coarse and a fine label, of which the fine one is used."""
    return Pixels(*read_cifar([folder / "train.bin"], 100, 2), *read_cifar([folder / "test.bin"], 100, 2))


def _read_svhn_set(folder: Path) -> Pixels:
    return Pixels(*read_svhn(folder / "train_32x32.mat"), *read_svhn(folder / "test_32x32.mat"))


def _remote_files(base_url: str, *files: tuple[str, int, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(base_url + file, sha256, size) for file, size, sha256 in files)


_IDX_FILES = tuple(
    f"{prefix}-{kind}-ubyte.gz" for prefix in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_DIGITS = tuple("0123456789")
_CAPITAL_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SMALL_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_SMALL_LETTERS_UNLIKE_CAPITALS = tuple("abdefghnqrt")

_MNIST = Source(
    name="mnist",
    folder="mnist",
    files=_IDX_FILES,
    remote_files=_remote_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (_IDX_FILES[0], 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (_IDX_FILES[1], 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (_IDX_FILES[2], 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (_IDX_FILES[3], 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
    + _remote_files(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
        (_QMNIST_TRAIN, 463024, "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f"),
        (
            "qmnist-test-labels-idx2-int.gz",
            526800,
            "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
        ),
    ),
    read_folder=_read_mnist,
    num_samples=(60_000, 10_000),
    shape=(1, 28, 28),
    classes=_DIGITS,
    licence="CC BY-SA 3.0; writer ids (QMNIST) BSD 3-clause",
    homepage="http://yann.lecun.com/exdb/mnist/",
    moments=((0.1307,), (0.3081,)),
)

_FASHION_MNIST = Source(
    name="fashion-mnist",
    folder="fashion-mnist",
    files=_IDX_FILES,
    remote_files=_remote_files(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        (_IDX_FILES[0], 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (_IDX_FILES[1], 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (_IDX_FILES[2], 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (_IDX_FILES[3], 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    read_folder=partial(_read_idx_set, train="train", test="t10k", classes=10),
    num_samples=(60_000, 10_000),
    shape=(1, 28, 28),
    classes=(
        *("t-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    licence="MIT",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    moments=((0.2860,), (0.3530,)),
    system_folders=(Path("/usr/share/datasets/fashion-mnist"),),
)

_CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_CIFAR10 = Source(
    name="cifar10",
    folder="cifar10",
    files=_CIFAR10_FILES,
    remote_files=(
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170052171,
            tuple(f"cifar-10-batches-bin/{file}" for file in _CIFAR10_FILES),
        ),
    ),
    read_folder=_read_cifar10,
    num_samples=(50_000, 10_000),
    shape=(3, 32, 32),
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    licence="not stated by its authors",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    subfolder="cifar-10-batches-bin",
    moments=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR100 = Source(
    name="cifar100",
    folder="cifar100",
    files=("train.bin", "test.bin"),
    remote_files=(
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168513733,
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ),
    ),
    read_folder=_read_cifar100,
    num_samples=(50_000, 10_000),
    shape=(3, 32, 32),
    classes=tuple(_CIFAR100_CLASSES.split()),
    licence="not stated by its authors",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    subfolder="cifar-100-binary",
    moments=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)

_SVHN = Source(
    name="svhn",
    folder="svhn",
    files=("train_32x32.mat", "test_32x32.mat"),
    remote_files=_remote_files(
        # This server has no HTTPS, so only the checksum protects the download.
        "http://ufldl.stanford.edu/housenumbers/",
        ("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
    read_folder=_read_svhn_set,
    num_samples=(73_257, 26_032),
    shape=(3, 32, 32),
    classes=_DIGITS,
    licence="non-commercial use only",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    moments=((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
)


class _EmnistSplit(NamedTuple):
    num_samples: tuple[int, int]
    classes: tuple[str, ...]
    first_label: int = 0  # number of the first class in the files


_EMNIST_SPLITS = {
    "balanced": _EmnistSplit((112_800, 18_800), _DIGITS + _CAPITAL_LETTERS + _SMALL_LETTERS_UNLIKE_CAPITALS),
    "byclass": _EmnistSplit((697_932, 116_323), _DIGITS + _CAPITAL_LETTERS + _SMALL_LETTERS),
    "bymerge": _EmnistSplit((697_932, 116_323), _DIGITS + _CAPITAL_LETTERS + _SMALL_LETTERS_UNLIKE_CAPITALS),
    "digits": _EmnistSplit((240_000, 40_000), _DIGITS),
    "letters": _EmnistSplit((124_800, 20_800), _CAPITAL_LETTERS, first_label=1),
    "mnist": _EmnistSplit((60_000, 10_000), _DIGITS),
}


def _emnist_files(split: str) -> tuple[str, ...]:
    return tuple(
        f"emnist-{split}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )


def _emnist_source(split: str) -> Source:
    num_samples, classes, first_label = _EMNIST_SPLITS[split]
    return Source(
        name=f"emnist:{split}",
        folder="emnist",
        files=_emnist_files(split),
        remote_files=(
            RemoteFile(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
                561753746,
                tuple(f"gzip/{file}" for name in _EMNIST_SPLITS for file in _emnist_files(name)),
            ),
        ),
        read_folder=partial(
            _read_idx_set,
            train=f"emnist-{split}-train",
            test=f"emnist-{split}-test",
            classes=len(classes),
            first_label=first_label,
            is_transposed=True,
        ),
        num_samples=num_samples,
        shape=(1, 28, 28),
        classes=classes,
        licence="not stated; made by NIST, a body of the US government",
        homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        subfolder="gzip",
    )


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        *(_MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _SVHN),
        *(_emnist_source(split) for split in _EMNIST_SPLITS),
    )
}
