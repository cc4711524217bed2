"""Samples of low and of high sensitivity: a fraction of all samples, or as a column says."""

import numpy as np
import pytest
import torch

from shoal.data import load, partition
from shoal.data.federation import Federation, num_sensitive_samples
from shoal.errors import UserError
from shoal.experiment.job import make_job
from shoal.types import CENTRALISED_CLIENT, Samples


def test_numbers_by_hand():
    # 0.3 of 10, 5, 2, 1 and 0 samples; at least one sample is not sensitive
    sizes = np.array([10, 5, 2, 1, 0])
    assert num_sensitive_samples(sizes, 0.3).tolist() == [3, 2, 1, 0, 0]
    assert num_sensitive_samples(sizes, 0.99).tolist() == [9, 4, 1, 0, 0]
    assert num_sensitive_samples(sizes, 0.0).tolist() == [0] * 5


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5])
def test_both_parts_together_are_the_split(fraction):
    federation = partition(load("digits"), "dirichlet:0.5", clients=5, seed=1, sensitive_fraction=fraction)
    for client in federation:
        data = federation[client]
        for split in ("train", "val"):
            low, high, both = data[f"{split}/low"], data[f"{split}/high"], data[split]
            assert torch.equal(torch.cat([low.x, high.x]), both.x)
            assert torch.equal(torch.cat([low.y, high.y]), both.y)
            assert abs(len(high.y) - fraction * len(both.y)) <= 0.5
        assert "test/high" not in data


def test_the_fraction_does_not_change_the_order_of_samples():
    a, b = (partition(load("digits"), "iid", clients=4, seed=1, sensitive_fraction=s) for s in (0.0, 0.5))
    assert all(torch.equal(a[c]["train"].x, b[c]["train"].x) for c in a)


def test_the_centralised_client_has_no_sensitive_part():
    assert set(partition(load("digits"), "iid", clients=4, seed=1)[CENTRALISED_CLIENT]) == {"train", "val", "test"}


def test_a_federation_from_tensors():
    samples = Samples(torch.arange(8.0)[:, None], torch.zeros(8, dtype=torch.int64))
    federation = Federation.from_clients({"a": {"train": samples}}, samples, ("x", "y"), sensitive_fraction=0.25)
    assert federation["a"]["train/high"].x.flatten().tolist() == [6.0, 7.0]
    assert len(federation["a"]["val/low"].y) == 0


def test_a_federation_from_sensitive_tensors():
    low, high = (
        Samples(torch.arange(a, b)[:, None].float(), torch.zeros(b - a, dtype=torch.int64)) for a, b in ((0, 3), (3, 5))
    )
    clients = {"a": {"train": low, "train/high": high}, "b": {"train": high}, "c": {"train/high": low}}
    federation = Federation.from_clients(clients, low, ("x", "y"))
    parts = {c: (len(federation[c]["train/low"].y), len(federation[c]["train/high"].y)) for c in clients}
    assert parts == {"a": (3, 2), "b": (2, 0), "c": (0, 3)}
    assert federation["a"]["train"].x.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(UserError, match="client a: split 'test/high' must be one of"):
        Federation.from_clients({"a": {"train": low, "test/high": high}}, low, ("x", "y"))


COLUMN = {"csv": "sensitive", "npz": "private"}


@pytest.fixture(params=COLUMN)
def own(request, tmp_path):
    """40 samples of four clients. Feature v of a sample is its number, and every third sample is sensitive."""
    v, w = np.arange(40.0), np.random.default_rng(0).normal(size=40)
    y, owner, flag = np.arange(40) // 2 % 2, [f"h{i % 4}" for i in range(40)], np.arange(40) % 3 == 0
    path = tmp_path / f"own.{request.param}"
    if request.param == "csv":
        lines = [f"{v[i]},{w[i]},{y[i]},{owner[i]},{int(flag[i])}" for i in range(40)]
        path.write_text("\n".join(["v,w,label,client,sensitive", *lines]))
    else:
        np.savez(path, x=np.stack([v, w], 1), y=y, client=np.array(owner), private=flag)
    return path, {"client_column": "client", "sensitive_column": COLUMN[request.param]}


@pytest.mark.parametrize("spec", ["natural", "iid"])
def test_a_column_decides(own, spec):
    path, columns = own
    dataset = load(str(path), **columns)
    assert dataset.input_shape == (2,)  # the column is not a feature
    federation = partition(dataset, spec, clients=4, seed=3, min_samples=5)
    train = torch.cat([federation[c]["train"].x for c in federation])
    index = (dataset.train.x[:, None] == train[None]).all(-1).float().argmax(0)  # in the data set
    is_sensitive = dataset.is_sensitive[index]
    ends = np.cumsum([len(federation[c]["train"].y) for c in federation])
    for client, end in zip(federation, ends, strict=True):
        data = federation[client]
        begin = end - len(data["train"].y)
        first_sensitive = begin + len(data["train/low"].y)
        assert not is_sensitive[begin:first_sensitive].any()
        assert is_sensitive[first_sensitive:end].all()
        assert len(data["val/low"].y) + len(data["val/high"].y) == len(data["val"].y)
    assert 0 < is_sensitive.sum() < len(is_sensitive)


def test_a_part_of_the_samples_keeps_its_sensitivity(own):
    path, columns = own
    dataset, part = load(str(path), **columns), load(str(path), max_train_samples=20, **columns)
    for x, flag in zip(part.train.x, part.is_sensitive, strict=True):
        assert dataset.is_sensitive[(dataset.train.x == x).all(1).nonzero()[0, 0]] == flag


class TestBadInput:
    def test_no_such_column(self, own):
        path, columns = own
        with pytest.raises(UserError, match=r"there is no sensitive (column|array) 'secret'"):
            load(str(path), **columns | {"sensitive_column": "secret"})

    def test_neither_0_nor_1(self, tmp_path):
        path = tmp_path / "own.csv"
        path.write_text("v,label,sensitive\n1,0,yes\n2,1,0\n3,0,1\n4,1,0\n")
        with pytest.raises(
            UserError, match=r"'yes' in 'sensitive' does not say whether a sample is sensitive. Use 0 and 1"
        ):
            load(str(path), sensitive_column="sensitive")

    def test_the_label_is_no_sensitivity(self, tmp_path):
        path = tmp_path / "own.csv"
        path.write_text("v,label\n1,0\n2,1\n3,0\n4,1\n")
        with pytest.raises(UserError, match="'label' is the label, so it cannot mark sensitive samples"):
            load(str(path), sensitive_column="label")

    def test_a_named_set_has_no_columns(self):
        with pytest.raises(UserError, match="sensitive_column is 'x', but digits is not a table"):
            load("digits", sensitive_column="x")

    def test_a_fraction_and_a_column(self):
        with pytest.raises(UserError, match=r"sensitive_fraction is 0.5 and sensitive_column is 'secret'. Set one"):
            make_job({"sensitive_fraction": 0.5, "sensitive_column": "secret"})


def test_sensitive_samples_do_not_affect_the_scaling_of_features(own):
    path, columns = own
    if path.suffix == ".csv":
        lines = path.read_text().splitlines()
        changed = [line if line.endswith(",0") or i == 0 else f"999{line}" for i, line in enumerate(lines)]
        path.write_text("\n".join(lines))
        before = load(str(path), **columns)
        path.write_text("\n".join(changed))
    else:
        before = load(str(path), **columns)
        arrays = dict(np.load(path))
        arrays["x"] = np.where(arrays["private"][:, None], 999.0, arrays["x"])
        np.savez(path, **arrays)
    after = load(str(path), **columns)
    assert torch.equal(before.train.x[~before.is_sensitive], after.train.x[~after.is_sensitive])
    assert not torch.equal(before.train.x, after.train.x)


def test_the_note_counts_sensitive_samples(own):
    path, columns = own
    dataset = load(str(path), **columns)
    note = partition(dataset, "natural", clients=None, seed=0, min_samples=5).note
    assert f"{int(dataset.is_sensitive.sum())} of {len(dataset.is_sensitive)} training samples are sensitive" in note
