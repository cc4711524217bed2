from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import SPLITS, Dataset, Federation, load, partition
from shoal.data.shifts import _rotate_images
from shoal.errors import UserError
from shoal.types import CENTRALISED_CLIENT, Samples

BASES = [
    "iid",
    "dirichlet:0.5",
    "equal:0.5",
    "groups:5,1.0",
    "labels:0-2/3-5/6-9",
    "labels:0,9/8,1/2-7",
    "shards:2",
    "quantity:1",
    "natural",
]


def numbered(num_samples: int = 3001, classes: int = 10, owners: int = 20) -> Dataset:
    """Feature 0 of sample i is i, so that a sample can be recognised. The label is i mod classes."""
    i = torch.arange(num_samples)
    train = Samples(torch.stack([i.float(), torch.ones(num_samples)], dim=1), i % classes)
    return Dataset(
        "numbered",
        train,
        Samples(train.x[:5], train.y[:5]),
        tuple(str(c) for c in range(classes)),
        owner=tuple(f"o{k % owners}" for k in range(num_samples)),
    )


def squares(num_samples: int = 400) -> Dataset:
    """3 x 3 images in which every pixel of every image has another value."""
    x = torch.arange(num_samples * 9, dtype=torch.float32).view(num_samples, 1, 3, 3) + 1
    y = torch.arange(num_samples) % 4
    return Dataset("squares", Samples(x, y), Samples(x[:4], y[:4]), ("a", "b", "c", "d"))


def sample_numbers(data) -> list[int]:
    return [int(v) for split in SPLITS for v in data[split].x[:, 0]]


@pytest.mark.parametrize("spec", BASES)
def test_every_sample_is_assigned_once(spec: str) -> None:
    d = numbered()
    f = partition(d, spec, clients=20, seed=1)
    assert len(f) == 20
    assert sorted(i for client in f for i in sample_numbers(f[client])) == list(range(3001))
    for data in f.values():
        for split in SPLITS:
            assert torch.equal(data[split].y, d.train.y[data[split].x[:, 0].long()])
    assert sum(f.samples_per_client(split) for split in SPLITS).min() >= 10


@pytest.mark.parametrize("spec", BASES)
def test_the_seed_decides(spec: str) -> None:
    pools = [partition(numbered(), spec, clients=20, seed=seed)[CENTRALISED_CLIENT]["train"].x for seed in (1, 1, 2)]
    assert torch.equal(pools[0], pools[1])
    assert pools[0].shape != pools[2].shape or not torch.equal(pools[0], pools[2])


@settings(max_examples=25, deadline=None)
@given(
    clients=st.integers(1, 12),
    num_samples=st.integers(100, 700),
    spec=st.sampled_from(["iid", "shards:2", "shards:3", "quantity:2", "dirichlet:1", "equal:0.1"]),
    seed=st.integers(0, 1000),
)
def test_any_number_of_samples_is_assigned_completely(clients: int, num_samples: int, spec: str, seed: int) -> None:
    f = partition(numbered(num_samples, classes=3), spec, clients=clients, seed=seed, min_samples=3)
    assert sorted(i for data in f.values() for i in sample_numbers(data)) == list(range(num_samples))


def test_iid_and_shards_are_even() -> None:
    sizes = sum(partition(numbered(), "iid", clients=20, seed=0).samples_per_client(s) for s in SPLITS)
    assert sorted(set(sizes.tolist())) == [150, 151]
    f = partition(numbered(), "shards:2", clients=20, seed=0)
    sizes = sum(f.samples_per_client(s) for s in SPLITS)
    assert sizes.min() >= 150 and sizes.max() <= 152
    assert (f.label_counts() > 0).sum(dim=1).max() <= 4
    other = partition(numbered(), "shards:2", clients=20, seed=1)
    assert not torch.equal(f.label_counts() > 0, other.label_counts() > 0)


def test_alpha_sets_the_skew() -> None:
    even, skewed = (partition(numbered(), f"dirichlet:{a}", clients=10, seed=0).label_counts() for a in (1000, 0.2))
    assert (even.float() - 30).abs().max() < 8
    assert (skewed == 0).sum() > 10


def test_equal_skews_labels_and_not_sizes() -> None:
    f = partition(numbered(), "equal:0.1", clients=20, seed=0)
    assert set(sum(f.samples_per_client(s) for s in SPLITS).tolist()) == {150, 151}
    largest = f.label_counts().float().amax(dim=1) / f.label_counts().sum(dim=1)
    assert largest[:10].median() > 0.5  # the clients before any class is used up
    even = partition(numbered(), "equal:1000", clients=20, seed=0).label_counts()[:10].float()
    assert (even / even.sum(dim=1, keepdim=True) - 0.1).abs().max() < 0.1


def test_equal_follows_each_clients_own_draw() -> None:
    """The share of the first of two classes has the variance of a Beta(a, a), 1 / (4 (2 a + 1)): 0.0833 with a = 1.

    Only the first half of the clients is checked, because the last clients get the remaining samples.
    """
    f = partition(numbered(40_000, classes=2), "equal:1", clients=400, seed=0)
    shares = (f.label_counts()[:200, 0] / f.label_counts()[:200].sum(dim=1)).double()
    assert float(shares.var()) == pytest.approx(1 / 12, rel=0.15)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.05)


def test_quantity_skews_sizes_and_not_labels() -> None:
    f = partition(numbered(6000), "quantity:0.5", clients=10, seed=0)
    counts = f.label_counts().float()
    sizes = counts.sum(dim=1)
    assert sizes.max() > 5 * sizes.min()
    largest = counts[sizes.argmax()]
    assert (largest / largest.sum() - 0.1).abs().max() < 0.05


def test_groups_keep_to_their_classes() -> None:
    f = partition(numbered(), "groups:3,1.0", clients=10, seed=0)
    blocks = {0: [0, 1, 2, 3], 1: [4, 5, 6], 2: [7, 8, 9]}
    assert f.planted_groups is not None
    assert list(f.planted_groups.values()) == [0] * 4 + [1] * 3 + [2] * 3
    for client, row in zip(f, f.label_counts(), strict=True):
        assert set(row.nonzero().squeeze(1).tolist()) <= set(blocks[f.planted_groups[client]])


@pytest.mark.parametrize(("clients", "blocks"), [(10, [4, 3, 3]), (20, [7, 7, 6])])
def test_label_groups(clients: int, blocks: list[int]) -> None:
    f = partition(numbered(), "labels:0-2/3-5/6-9", clients=clients, seed=0)
    assert f.planted_groups is not None
    groups = list(f.planted_groups.values())
    assert [groups.count(i) for i in range(3)] == blocks
    assert groups == sorted(groups)
    present = f.label_counts() > 0
    for group, classes in enumerate([range(3), range(3, 6), range(6, 10)]):
        inside = present[[g == group for g in groups]]
        assert inside.all(dim=0).nonzero().squeeze(1).tolist() == list(classes)
        assert inside.any(dim=0).nonzero().squeeze(1).tolist() == list(classes)


def test_natural_keeps_the_owners() -> None:
    d = numbered(1000, owners=7)
    f = partition(d, "natural", clients=None, seed=0)
    assert list(f) == [f"o{k}" for k in range(7)]
    assert all({i % 7 for i in sample_numbers(f[f"o{k}"])} == {k} for k in range(7))
    some = partition(d, "natural", clients=3, seed=0)
    assert len(some) == 3 and set(some) < set(f)
    assert sorted(sample_numbers(some[CENTRALISED_CLIENT])) == [i for i in range(1000) if f"o{i % 7}" in some]
    with pytest.raises(UserError, match="clients is 8, but only 7 owners have enough samples"):
        partition(d, "natural", clients=8, seed=0)


def test_small_owners_are_left_out_only_with_drop() -> None:
    d = numbered(100)
    d = Dataset(d.name, d.train, d.test, d.classes, owner=("big",) * 50 + ("mid",) * 45 + ("tiny",) * 5)
    with pytest.raises(UserError, match=r"1 of 3 clients have fewer than 10 samples. .*--min-samples.*natural:drop"):
        partition(d, "natural", clients=None, seed=0)
    f = partition(d, "natural:drop", clients=None, seed=0)
    assert list(f) == ["big", "mid"]
    assert f.note == "1 of 3 clients left out: fewer than 10 samples"
    assert sorted(sample_numbers(f[CENTRALISED_CLIENT])) == list(range(95))
    with pytest.raises(UserError, match="3 of 3 clients have fewer than 60"):
        partition(d, "natural:drop", clients=None, seed=0, min_samples=60)


def test_splits_have_their_shares() -> None:
    f = partition(numbered(300), "iid", clients=10, seed=0)
    assert [f.samples_per_client(s).tolist() for s in SPLITS] == [[21] * 10, [3] * 10, [6] * 10]
    f = partition(numbered(40), "iid", clients=10, seed=0, min_samples=3)
    assert [f.samples_per_client(s).tolist() for s in SPLITS] == [[2] * 10, [1] * 10, [1] * 10]
    f = partition(numbered(300), "iid", clients=10, seed=0, val_fraction=0, test_fraction=0)
    assert [f.samples_per_client(s).tolist() for s in SPLITS] == [[30] * 10, [0] * 10, [0] * 10]
    assert f["c0"]["val"].x.shape == (0, 2)


def test_every_split_is_a_view_of_one_tensor() -> None:
    f = partition(numbered(), "dirichlet:1", clients=20, seed=0)
    storages = {
        part.untyped_storage().data_ptr()
        for client in (*f, CENTRALISED_CLIENT)
        for split in SPLITS
        for part in (f[client][split].x,)
    }
    assert len(storages) == 1


def test_the_centralised_client_has_all_samples_and_is_not_counted() -> None:
    f = partition(numbered(), "dirichlet:1", clients=20, seed=0)
    for split in SPLITS:
        assert torch.equal(f[CENTRALISED_CLIENT][split].x, torch.cat([f[client][split].x for client in f]))
    assert CENTRALISED_CLIENT not in f and CENTRALISED_CLIENT not in list(f)
    assert len(f) == 20
    with pytest.raises(KeyError):
        f["c99"]


def test_the_facts_of_a_federation() -> None:
    d = numbered()
    f = partition(d, "iid", clients=10, seed=0)
    assert (f.name, f.partition, f.classes, f.input_shape) == ("numbered", "iid", d.classes, (2,))
    assert list(f)[:2] == ["c0", "c1"]
    assert next(iter(partition(d, "iid", clients=101, seed=0))) == "c000"
    assert f.central is d.test
    assert f.planted_groups is None and f.shifts == {}
    assert torch.equal(f.label_counts().sum(dim=0), d.train.y.bincount())
    assert f.label_counts()[3].tolist() == sum(f["c3"][s].y.bincount(minlength=10) for s in SPLITS).tolist()


def test_all_tensors_of_a_federation_move() -> None:
    f = partition(numbered(), "groups:2,1", clients=10, seed=0).to("meta")
    assert f["c3"]["train"].x.device.type == f.central.x.device.type == "meta"
    assert f.planted_groups is not None and len(f) == 10


def test_rotation_turns_all_images_of_a_client() -> None:
    d = squares()
    f = partition(d, "iid+rotate:0,90,180,270", clients=8, seed=0)
    plain = partition(d, "iid", clients=8, seed=0)
    assert f.planted_groups is not None
    assert sorted(f.planted_groups.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(f.planted_groups.values()) != [0, 1, 2, 3] * 2
    for client in f:
        k = f.planted_groups[client]
        assert f.shifts.get(client) == (f"rotate {90 * k}" if k else None)
        for split in SPLITS:
            assert torch.equal(f[client][split].x, plain[client][split].x.rot90(k, dims=(2, 3)))
    assert torch.equal(f.central.x, d.test.x)


def test_the_data_set_itself_is_never_changed() -> None:
    d = squares()
    before = d.train.x.clone(), d.train.y.clone()
    partition(d, "iid+rotate:90+invert:1+noise:1+mislabel:1+permute:1", clients=4, seed=0)
    assert torch.equal(d.train.x, before[0]) and torch.equal(d.train.y, before[1])


def test_other_angles_agree_with_quarter_turns() -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(_rotate_images(x, 90.001), _rotate_images(x, 90), atol=1e-2)
    assert torch.allclose(
        _rotate_images(_rotate_images(torch.ones(1, 1, 9, 9), 45), -45), torch.ones(1, 1, 9, 9), atol=1e-5
    )


def test_inversion_takes_its_share_of_clients() -> None:
    f = partition(squares(), "iid+invert:0.25", clients=8, seed=0)
    plain = partition(squares(), "iid", clients=8, seed=0)
    inverted = [client for client in f if client in f.shifts]
    assert len(inverted) == 2
    for client in f:
        sign = -1 if client in inverted else 1
        assert all(torch.equal(f[client][s].x, sign * plain[client][s].x) for s in SPLITS)
    assert f.planted_groups == {client: int(client in inverted) for client in f}


def test_noise_grows_over_the_clients() -> None:
    f = partition(squares(4000), "iid+noise:2", clients=5, seed=0)
    plain = partition(squares(4000), "iid", clients=5, seed=0)
    for i, client in enumerate(f):
        for split in SPLITS:
            spread = (f[client][split].x - plain[client][split].x).std().item()
            assert spread == pytest.approx(0.5 * i, rel=0.1)
    assert f.shifts == {"c1": "noise 0.5", "c2": "noise 1", "c3": "noise 1.5", "c4": "noise 2"}


def test_mislabelling_spares_the_test_samples() -> None:
    f = partition(squares(4000), "iid+mislabel:0.8", clients=5, seed=0)
    plain = partition(squares(4000), "iid", clients=5, seed=0)
    for client in f:
        rate = float(f.shifts[client].removeprefix("mislabel "))
        wrong_fraction = (f[client]["train"].y != plain[client]["train"].y).float().mean().item()
        assert 0 <= rate <= 0.8
        assert wrong_fraction == pytest.approx(rate, abs=0.08)
        assert torch.equal(f[client]["test"].y, plain[client]["test"].y)
    assert (f[CENTRALISED_CLIENT]["val"].y != plain[CENTRALISED_CLIENT]["val"].y).any()
    assert f.planted_groups is None


def test_permutation_changes_every_meaning_in_one_way() -> None:
    f = partition(squares(), "iid+permute:0.5", clients=8, seed=0)
    plain = partition(squares(), "iid", clients=8, seed=0)
    meanings = {
        (int(a), int(b))
        for client in f.shifts
        for split in SPLITS
        for a, b in zip(plain[client][split].y, f[client][split].y, strict=True)
    }
    assert len(f.shifts) == 4
    assert len(meanings) == 4 and all(a != b for a, b in meanings)
    assert {b for _, b in meanings} == {0, 1, 2, 3}
    for client in set(f) - set(f.shifts):
        assert torch.equal(f[client]["train"].y, plain[client]["train"].y)


def test_groups_and_rotations_combine() -> None:
    f = partition(squares(), "groups:2,10+rotate:0,180", clients=8, seed=0)
    blocks = partition(squares(), "groups:2,10", clients=8, seed=0).planted_groups
    assert f.planted_groups is not None and blocks is not None
    expected = {client: 2 * blocks[client] + (client in f.shifts) for client in f}
    combinations = sorted(set(expected.values()))
    assert f.planted_groups == {client: combinations.index(code) for client, code in expected.items()}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform", "'uniform' is not a base; write one of iid, dirichlet:0.3, equal:0.3, groups:5,1.0"),
        ("", "'' is not a base"),
        ("iid+blur:1", "'blur' is not a shift; write one of rotate:0,90,180,270, invert:0.5"),
        ("iid:3", "'iid:3': it takes no argument, as in iid"),
        ("dirichlet", r"it needs 1 number\(s\), ALPHA, as in dirichlet:0.3"),
        ("dirichlet:1,2", "it needs 1 .* but has 2, as in dirichlet:0.3"),
        ("dirichlet:x", "must be numbers with commas between them, as in dirichlet:0.3"),
        ("dirichlet:0", "ALPHA is 0, but it must be above 0, as in dirichlet:0.3"),
        ("dirichlet:nan", "numbers must be finite"),
        ("equal:0", "ALPHA is 0, but it must be above 0, as in equal:0.3"),
        ("quantity:-1", "ALPHA is -1, but it must be above 0, as in quantity:0.5"),
        ("groups:2", r"it needs 2 number\(s\), RHO, ALPHA, but has 1, as in groups:5,1.0"),
        ("groups:2.5,1", "RHO is 2.5, but it must be a whole number"),
        ("groups:11,1", "20 clients and 10 classes cannot form 11 groups, but at most 10"),
        ("labels:0-2/3-5", "each of the classes 0 to 9 must be in exactly one group, as in labels:0-2/3-5/6-9"),
        ("labels:0-5/5-9", "exactly one group"),
        ("labels:0-9/", "class numbers need / between"),
        ("labels:a/b", "class numbers need / between"),
        ("shards:0", "K is 0, but it must be a whole number"),
        ("shards:200", "4000 shards cannot be cut from 3001 samples"),
        ("natural:keep", "only drop may follow the colon, as in natural"),
        ("iid+rotate:90", "only square images can be rotated"),
        ("iid+invert:2", "FRACTION is 2, but it must be between 0 and 1, as in invert:0.5"),
        ("iid+noise:0", "SIGMA is 0, but it must be above 0"),
        ("iid+mislabel", "it needs 1"),
    ],
)
def test_wrong_partitions_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        partition(numbered(), spec, clients=20, seed=0)


def test_impossible_requests_are_refused() -> None:
    d = numbered(1000)
    with pytest.raises(
        UserError, match="clients is 101, but 1000 training samples are enough for 100 with at least 10"
    ):
        partition(d, "iid", clients=101, seed=0)
    with pytest.raises(UserError, match="'iid' needs the number of clients"):
        partition(d, "iid", clients=None, seed=0)
    with pytest.raises(UserError, match="clients is 0"):
        partition(d, "iid", clients=0, seed=0)
    with pytest.raises(
        UserError, match=r"in 1000 draws .* fewer than 10 samples. Ask for fewer clients, a larger ALPHA"
    ):
        partition(d, "dirichlet:0.01", clients=50, seed=0)
    with pytest.raises(UserError, match="min_samples is 2, but a client needs at least 3"):
        partition(d, "iid", clients=5, seed=0, min_samples=2)
    with pytest.raises(UserError, match="leave nothing to train on"):
        partition(d, "iid", clients=5, seed=0, val_fraction=0.5, test_fraction=0.5)
    with pytest.raises(UserError, match=r"val_fraction is -0.1"):
        partition(d, "iid", clients=5, seed=0, val_fraction=-0.1)
    with pytest.raises(UserError, match="a client of 4 samples nothing to train on"):
        partition(numbered(40), "iid", clients=10, seed=0, min_samples=4, val_fraction=0.4, test_fraction=0.5)
    with pytest.raises(UserError, match="squares has no owners of samples"):
        partition(squares(), "natural", clients=None, seed=0)


def test_a_federation_from_tensors() -> None:
    def samples(*values: int) -> Samples:
        return Samples(torch.tensor(values).float()[:, None], torch.tensor(values) % 2)

    clients = {"north": {"train": samples(1, 2), "test": samples(3)}, "south": {"train": samples(4), "val": samples(5)}}
    f = Federation.from_clients(clients, central=samples(8, 9), classes=("even", "odd"))
    assert f["north"]["train"].x.squeeze(1).tolist() == [1, 2]
    assert f["north"]["val"].x.shape == (0, 1)
    assert f["south"]["val"].y.tolist() == [1]
    assert f[CENTRALISED_CLIENT]["train"].x.squeeze(1).tolist() == [1, 2, 4]
    assert f.samples_per_client("test").tolist() == [1, 0]
    assert f.label_counts().tolist() == [[1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, "'train' must have at least one sample"),
        ({"trial": (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))}, "split 'trial' must be one of train"),
        ({"train": (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))}, r"shape \(3,\) .* has \(2,\)"),
        ({"train": (torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64))}, "2 samples but 1 labels"),
        ({"train": (torch.zeros(1, 2), torch.tensor([2]))}, r"not all int64 in 0\.\.1"),
        ({"train": (torch.zeros(1, 2), torch.tensor([1.0]))}, "labels of torch.float32"),
    ],
)
def test_wrong_tensors_are_refused(splits, message: str) -> None:
    central = Samples(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match=message):
        Federation.from_clients({"a": {k: Samples(*v) for k, v in splits.items()}}, central, ("x", "y"))


def test_a_client_cannot_have_the_name_of_the_centralised_client() -> None:
    samples = Samples(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="client names must differ"):
        Federation.from_clients({CENTRALISED_CLIENT: {"train": samples}}, samples, ("x", "y"))


def test_a_hundred_thousand_clients() -> None:
    d = load("synthetic:1,1,4,6", clients=100_000)
    f = partition(d, "natural", clients=None, seed=0, min_samples=4)
    assert len(f) == 100_000
    assert int(f.label_counts().sum()) == len(d.train.y)
    assert f["c54321"]["train"].x.shape[1:] == (60,)


@pytest.mark.data
def test_groups_of_fashion_mnist() -> None:
    f = partition(load("fashion-mnist", download=False), "groups:5,1.0", clients=100, seed=0)
    assert f.planted_groups is not None
    counts = f.label_counts()
    assert int(counts.sum()) == 60_000 and int(counts.sum(dim=1).min()) >= 10
    for i, client in enumerate(f):
        block = i // 20
        assert f.planted_groups[client] == block
        assert counts[i, 2 * block : 2 * block + 2].sum() == counts[i].sum()


@pytest.mark.data
def test_writers_of_mnist() -> None:
    f = partition(load("mnist", download=False), "natural", clients=None, seed=0)
    sizes = sum(f.samples_per_client(split) for split in SPLITS)
    assert (len(f), int(sizes.min()), int(sizes.max())) == (539, 19, 131)
    assert np.allclose(f.samples_per_client("test").numpy(), 0.2 * sizes.numpy(), atol=0.5)
