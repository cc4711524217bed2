from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import Dataset, get_folder, list_datasets, load, sources, validate
from shoal.data.archives import unpack
from shoal.data.catalogue import SOURCES, RemoteFile
from shoal.errors import UserError
from shoal.types import Samples


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither SHOAL_DATA nor a cache holds anything."""
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def idx(array: np.ndarray) -> bytes:
    array = array.astype(np.uint8)
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx_set(folder: Path, train: str, test: str, labels: list[int], gz: bool = True) -> np.ndarray:
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28))
    for prefix in (train, test):
        for name, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", np.array(labels))):
            content = idx(array)
            path = folder / f"{prefix}-{name}{'.gz' if gz else ''}"
            path.write_bytes(gzip.compress(content) if gz else content)
    return pixels


def dataset(x: list[list[float]], y: list[int], classes: int = 2) -> Dataset:
    samples = Samples(torch.tensor(x), torch.tensor(y))
    return Dataset("mine", samples, samples, tuple(str(c) for c in range(classes)))


@pytest.mark.parametrize(
    ("x", "y", "classes", "message"),
    [
        ([[1.0], [float("nan")]], [0, 1], 2, "the training part has 1 features that are NaN"),
        ([[1.0], [float("-inf")]], [0, 1], 2, "the training part has 1 features that are NaN or infinite"),
        ([[3.0], [3.0]], [0, 1], 2, "the same number, 3"),
        ([[1.0], [2.0]], [0, 2], 2, r"labels from 0 to 2, but they must be in 0\.\.1"),
        ([[1.0], [2.0]], [-1, 1], 2, r"labels from -1 to 1"),
        ([[1.0], [2.0]], [0, 0], 1, "at least 2 are needed"),
        ([], [], 2, "the training part is empty"),
        ([[1.0], [2.0]], [0], 2, "2 samples but 1 labels"),
    ],
)
def test_unfit_data_is_refused(x, y, classes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(dataset(x, y, classes))


def test_fit_data_pass() -> None:
    fit = dataset([[1.0], [2.0]], [0, 1])
    assert validate(fit) is fit
    assert fit.input_shape == (1,)
    with pytest.raises(UserError, match="1 owners for 2 training samples"):
        validate(replace(fit, owner=("a",)))


def test_digits() -> None:
    d = load("digits")
    assert d.input_shape == (1, 8, 8)
    assert (len(d.train.y), len(d.test.y)) == (1438, 359)
    shares = d.test.y.bincount() / (d.test.y.bincount() + d.train.y.bincount())
    assert (shares - 0.2).abs().max() < 0.01
    assert abs(d.train.x.mean()) < 1e-5 and abs(d.train.x.std() - 1) < 1e-3
    assert torch.equal(load("digits").test.x, d.test.x)
    assert not torch.equal(load("digits", seed=1).test.x, d.test.x)


def test_max_train_samples_keeps_a_stratified_part() -> None:
    d = load("digits", max_train_samples=500)
    assert len(d.train.y) == 500
    assert d.note == "a stratified 500 of 1,438 training samples"
    assert (d.train.y.bincount() / 500 - load("digits").train.y.bincount() / 1438).abs().max() < 0.003
    assert load("digits", max_train_samples=10).train.y.sort().values.tolist() == list(range(10))
    with pytest.raises(UserError, match="max_train_samples is 2000, but digits has 1438"):
        load("digits", max_train_samples=2000)


def test_synthetic_data_follow_their_formula() -> None:
    d = load("synthetic:0,0", clients=400, seed=3)
    assert d.owner is not None and len(set(d.owner)) == 400
    assert d.input_shape == (60,)
    sizes = np.unique(np.array(d.owner), return_counts=True)[1]
    assert sizes.min() >= 50 and sizes.max() == 1000
    owner = np.array(d.owner)
    spread = np.stack([d.train.x.numpy()[owner == k].var(axis=0, ddof=1) for k in sorted(set(owner))]).mean(axis=0)
    assert np.allclose(spread, np.arange(1, 61) ** -1.2, rtol=0.05)
    assert torch.equal(d.train.x, load("synthetic:0,0", clients=400, seed=3).train.x)


def test_synthetic_beta_moves_the_features() -> None:
    """Client means are B_k + N(0, 1) over 60 features: the variance of B_k is beta squared."""

    def variance_of_client_means(name: str) -> float:
        d = load(name, clients=500, seed=0)
        owner = np.unique(np.array(d.owner), return_inverse=True)[1]
        means = np.zeros(500)
        np.add.at(means, owner, d.train.x.numpy().mean(axis=1))
        return float((means / np.bincount(owner)).var())

    assert variance_of_client_means("synthetic:0,0,30,30") == pytest.approx(1 / 60, rel=0.2)
    assert variance_of_client_means("synthetic:0,2,30,30") == pytest.approx(4 + 1 / 60, rel=0.2)


def test_synthetic_sizes_are_bounded() -> None:
    d = load("synthetic:1,1,5,20", clients=50)
    sizes = np.unique(np.array(d.owner), return_counts=True)[1]
    assert sizes.min() >= 5 and sizes.max() == 20
    assert len(load("synthetic:1,1,20,20", clients=7).train.y) == 140


@pytest.mark.parametrize("name", ["synthetic", "synthetic:1", "synthetic:1,x", "synthetic:1,1,9", "synthetic:1,nan"])
def test_synthetic_forms(name: str) -> None:
    with pytest.raises(UserError, match="not of the form synthetic:ALPHA,BETA"):
        load(name)


def test_synthetic_bounds_are_checked() -> None:
    with pytest.raises(UserError, match="must not be below 0"):
        load("synthetic:-1,1")
    with pytest.raises(UserError, match=r"samples per client 9\.\.8"):
        load("synthetic:1,1,9,8")
    with pytest.raises(UserError, match="clients is 0"):
        load("synthetic:1,1", clients=0)


def test_unknown_names_get_the_closest() -> None:
    known = "known are digits, synthetic:ALPHA,BETA, sensors, mnist"
    with pytest.raises(UserError, match=rf"did you mean .*fashion-mnist.*{known}"):
        load("fashion_mnist")
    with pytest.raises(UserError, match=r"did you mean emnist:letters"):
        load("emnist:leters")
    with pytest.raises(UserError, match="client_column is 'site', but digits is not a table"):
        load("digits", client_column="site")


@pytest.mark.parametrize("gz", [True, False])
def test_emnist_letters_are_upright_and_start_at_a(empty_machine: Path, gz: bool) -> None:
    folder = empty_machine / "own" / "emnist"
    pixels = write_idx_set(folder, "emnist-letters-train", "emnist-letters-test", [1, 26, 2], gz)
    d = load("emnist:letters", download=False)
    assert [d.classes[y] for y in d.train.y] == ["A", "Z", "B"]
    upright = (pixels.transpose(0, 2, 1) - pixels.mean()) / pixels.std()
    assert np.allclose(d.train.x[:, 0].numpy(), upright, atol=1e-4)
    assert d.note == "3 of 124,800 training samples; 3 of 20,800 test samples"


def test_mnist_without_writers_has_no_owner(empty_machine: Path) -> None:
    write_idx_set(empty_machine / "own" / "mnist", "train", "t10k", [0, 1])
    assert load("mnist").owner is None


def test_the_folder_of_the_user_comes_before_the_cache(empty_machine: Path) -> None:
    write_idx_set(empty_machine / "cache" / "shoal" / "mnist", "train", "t10k", [0, 1])
    assert len(load("mnist").train.y) == 2
    write_idx_set(empty_machine / "own" / "mnist", "train", "t10k", [0, 1, 2])
    assert len(load("mnist").train.y) == 3
    (empty_machine / "own" / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(load("mnist").train.y) == 2


def test_data_in_the_system_folder_are_found(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SOURCES["fashion-mnist"].system_folders == (Path("/usr/share/datasets/fashion-mnist"),)
    write_idx_set(empty_machine / "system", "train", "t10k", [0, 1, 2])
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], system_folders=(empty_machine / "system",)))
    write_idx_set(empty_machine / "cache" / "shoal" / "mnist", "train", "t10k", [0, 1])
    assert len(load("mnist").train.y) == 3


def test_cifar100_in_its_official_folder(empty_machine: Path) -> None:
    folder = empty_machine / "own" / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(bytes([0, 99]) + bytes(3072) + bytes([1, 0]) + bytes([255]) * 3072)
    d = load("cifar100")
    assert [d.classes[y] for y in d.train.y] == ["worm", "apple"]
    assert len(set(d.classes)) == 100
    assert d.train.x[1, 0, 0, 0].item() == pytest.approx((1 - 0.5071) / 0.2673)
    assert d.train.x[0, 2, 5, 5].item() == pytest.approx(-0.4409 / 0.2762)


def test_the_error_for_a_missing_set_says_what_to_do(empty_machine: Path) -> None:
    with pytest.raises(UserError, match=r"shoal data get svhn` \(246 MB\), or put train_32x32.mat, test_32x32.mat"):
        load("svhn", download=False)
    with pytest.raises(UserError, match=r"'digits' cannot be downloaded\. The sets to download are mnist"):
        get_folder("digits")


def test_listing(empty_machine: Path) -> None:
    write_idx_set(empty_machine / "own" / "mnist", "train", "t10k", [0, 1])
    lines = {line.name: line for line in list_datasets()}
    assert lines["mnist"].where == str(empty_machine / "own" / "mnist")
    assert lines["cifar10"].where == "download, 170 MB"
    assert lines["digits"].where == "built in"
    digits = load("digits")
    assert lines["digits"].num_samples == (len(digits.train.y), len(digits.test.y))
    assert {f"emnist:{s}" for s in ("balanced", "byclass", "bymerge", "digits", "letters", "mnist")} <= set(lines)
    assert [lines[f"emnist:{s}"].num_classes for s in ("balanced", "byclass", "letters")] == [47, 62, 26]


def test_records_are_complete() -> None:
    for source in SOURCES.values():
        assert len(set(source.classes)) == len(source.classes)
        fetched = {Path(m).name for r in source.remote_files for m in (r.members or (r.file_name,))}
        assert set(source.files) <= fetched
        for remote in source.remote_files:
            assert len(bytes.fromhex(remote.sha256)) == 32
            assert remote.url.startswith("https://") or source.name == "svhn"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is served."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "home"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_archive_is_downloaded_unpacked_and_removed(empty_machine: Path, home, monkeypatch) -> None:
    folder, address = home
    official = SOURCES["cifar10"].remote_files[0]
    archive = folder / official.file_name
    with tarfile.open(archive, "w:gz") as tar:
        for i, member in enumerate(official.members):
            content = bytes([i]) + bytes([40 * i]) * 3072
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = archive.read_bytes()
    remote = RemoteFile(address + archive.name, hashlib.sha256(content).hexdigest(), len(content), official.members)
    monkeypatch.setitem(SOURCES, "cifar10", replace(SOURCES["cifar10"], remote_files=(remote,)))

    d = load("cifar10")
    assert d.train.y.tolist() == [0, 1, 2, 3, 4] and d.test.y.tolist() == [5]
    cached = empty_machine / "cache" / "shoal" / "cifar10"
    assert [path.name for path in cached.iterdir()] == ["cifar-10-batches-bin"]
    archive.unlink()
    assert get_folder("cifar10") == cached / "cifar-10-batches-bin"


def test_single_files_are_downloaded(empty_machine: Path, home, monkeypatch) -> None:
    folder, address = home
    write_idx_set(folder / "set", "train", "t10k", [0, 1])
    (folder / "set" / "optional.gz").write_bytes(b"more")
    remotes = tuple(
        RemoteFile(f"{address}set/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        for path in (folder / "set").iterdir()
    )
    monkeypatch.setitem(
        SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], remote_files=remotes, system_folders=())
    )
    seen: set[str] = set()
    assert get_folder("fashion-mnist", lambda name, done, total: seen.add(name)) == (
        empty_machine / "cache" / "shoal" / "fashion-mnist"
    )
    assert len(seen) == 5
    optional = empty_machine / "cache" / "shoal" / "fashion-mnist" / "optional.gz"
    optional.unlink()
    seen.clear()
    get_folder("fashion-mnist", lambda name, done, total: seen.add(name))
    assert seen == {"optional.gz"} and optional.exists()
    assert len(load("fashion-mnist", download=False).train.y) == 2


def test_only_needed_files_are_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("gzip/wanted", "w")
        zipped.writestr("../outside", "o")
        zipped.writestr("gzip/other", "x")
    unpack(archive, ["gzip/wanted"], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wanted"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "out"]


def test_unpacking_is_all_or_nothing(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("d/good"), io.BytesIO())
        link = tarfile.TarInfo("d/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    with pytest.raises(UserError, match=r"missing in this archive.*d/absent"):
        unpack(archive, ["d/good", "d/absent"], tmp_path / "out")
    with pytest.raises(UserError, match="d/link is not a regular file"):
        unpack(archive, ["d/good", "d/link"], tmp_path / "out")
    archive.write_bytes(archive.read_bytes()[:20])
    with pytest.raises(UserError, match=r"a.tar.gz: damaged archive"):
        unpack(archive, ["d/good"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_official_files_have_the_recorded_checksums(name: str) -> None:
    folder = sources.find_folder(SOURCES[name])
    assert folder is not None
    for remote in SOURCES[name].remote_files:
        content = (folder / remote.file_name).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (remote.sha256, remote.size_bytes)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "shape", "note"),
    [
        ("mnist", (60_000, 1, 28, 28), ""),
        ("fashion-mnist", (60_000, 1, 28, 28), ""),
        ("cifar10", (50_000, 3, 32, 32), ""),
        ("svhn", (30_000, 3, 32, 32), "30,000 of 73,257 training samples; 10,000 of 26,032 test samples"),
    ],
)
def test_published_sets_are_standardised(name: str, shape: tuple[int, ...], note: str) -> None:
    d = load(name, download=False)
    assert d.train.x.shape == shape and len(d.test.y) == 10_000
    assert d.note == note
    assert d.train.x.mean(dim=(0, 2, 3)).abs().max() < 0.03
    assert (d.train.x.std(dim=(0, 2, 3)) - 1).abs().max() < 0.03
    assert d.train.y.unique().tolist() == list(range(10))


@pytest.mark.data
def test_the_owners_of_mnist_are_its_writers() -> None:
    d = load("mnist", download=False)
    assert d.owner is not None
    sizes = np.unique(np.array(d.owner), return_counts=True)[1]
    assert (len(sizes), sizes.min(), sizes.max(), sizes.sum()) == (539, 19, 131, 60_000)
