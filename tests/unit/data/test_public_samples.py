"""Public samples, which no client has."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from shoal.data import SPLITS, Dataset, Federation, load, partition
from shoal.data.prepare import proportional_mask
from shoal.errors import UserError
from shoal.experiment import assemble
from shoal.experiment.job import make_job
from shoal.experiment.run import check_same_job, run, run_job
from shoal.methods import METHODS, dry_build
from shoal.store.reader import read_run
from shoal.types import Samples

BASES = ["iid", "dirichlet:0.5", "groups:5,1.0", "labels:0-2/3-5/6-9", "shards:2", "quantity:1", "natural"]


def numbered(num_samples: int = 1000, classes: int = 10, owners: int = 20) -> Dataset:
    """The feature of sample i is i, its label i mod classes, and its owner i mod owners."""
    i = torch.arange(num_samples)
    train, names = Samples(i.float()[:, None], i % classes), tuple(str(c) for c in range(classes))
    return Dataset("numbered", train, Samples(train.x[:5], train.y[:5]), names, tuple(f"o{k % owners}" for k in i))


def client_samples(federation: Federation) -> list[int]:
    return [int(v) for data in federation.values() for split in SPLITS for v in data[split].x.flatten()]


def digest(federation: Federation) -> str:
    bytes_ = b"".join(t.numpy().tobytes() for data in federation.values() for s in SPLITS for t in data[s])
    return hashlib.sha256(bytes_).hexdigest()[:12]


def counts_of(y: list[int], count: int, seed: int = 0) -> list[int]:
    labels = np.array(y)
    return np.bincount(labels[proportional_mask(labels, count, seed)], minlength=max(y) + 1).tolist()


class TestProportionalMask:
    def test_largest_remainders_by_hand(self):
        # 5 of 9 samples in classes of 5, 3 and 1: quotas 25/9, 15/9, 5/9, so 2, 1, 0 and remainders 7, 6, 5 of 9:
        # the two remaining samples go to the first two classes.
        assert counts_of([0] * 5 + [1] * 3 + [2], 5) == [3, 2, 0]

    def test_fractions_that_come_out_even(self):
        assert counts_of([0, 1] * 10 + [2] * 20, 8) == [2, 2, 4]

    def test_fewer_than_classes(self):
        """No class has two samples, however large it is, and the classes that have one are random."""
        y = [0] * 90 + [1] * 5 + [3] * 5
        counts = {tuple(counts_of(y, 2, seed)) for seed in range(30)}
        assert counts == {(1, 1, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1)}

    def test_all_and_none(self):
        assert counts_of([0, 1, 1, 2], 4) == [1, 2, 1]
        assert counts_of([0, 1, 1, 2], 0) == [0, 0, 0]
        assert proportional_mask(np.array([], dtype=np.int64), 0, 0).tolist() == []


@pytest.mark.parametrize("spec", BASES)
def test_every_sample_is_public_or_has_a_client(spec):
    federation = partition(numbered(), spec, clients=20, seed=1, public_samples=200, min_samples=5)
    public = federation.public_samples.x.flatten().int().tolist()
    assert sorted(client_samples(federation) + public) == list(range(1000))
    assert torch.bincount(federation.public_samples.y).tolist() == [20] * 10
    assert [i % 10 for i in public] == federation.public_samples.y.tolist()
    assert int(federation.label_counts().sum()) == 800


def test_the_seed_chooses_the_public_samples():
    drawn = [
        partition(numbered(), "iid", clients=20, seed=s, public_samples=30).public_samples.x.flatten().tolist()
        for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# The data of clients must not change: digests from before public samples existed.
DIGESTS = {
    "iid": "ccb59878e62f",
    "dirichlet:0.5": "0324ce8c12ce",
    "groups:5,1.0": "d4b989c2f6f6",
    "labels:0-2/3-5/6-9": "51560a41a5ce",
    "shards:2": "9503de6fd466",
    "quantity:1": "4febb3030759",
    "natural": "e59d97d8f9d3",
}


@pytest.mark.parametrize("spec", BASES)
def test_clients_without_public_samples_have_the_same_data(spec):
    federation = partition(numbered(), spec, clients=20, seed=1, min_samples=5)
    assert digest(federation) == DIGESTS[spec]
    assert federation.public_samples is None


def test_a_natural_partition_keeps_its_owners():
    federation = partition(numbered(), "natural", seed=0, public_samples=100)
    assert len(federation) == 20
    for client, data in federation.items():
        assert {int(v) % 20 for split in SPLITS for v in data[split].x.flatten()} == {int(client[1:])}


def test_a_natural_client_that_loses_its_samples_is_an_error():
    """50 clients have one sample each and one has 950, so that 960 public samples include some of the 50 clients."""
    d = numbered()
    owned = Dataset(d.name, d.train, d.test, d.classes, tuple(f"o{i}" if i < 50 else "big" for i in range(1000)))
    fractions = {"min_samples": 1, "val_fraction": 0, "test_fraction": 0}
    assert len(partition(owned, "natural", seed=0, **fractions)) == 51
    with pytest.raises(
        UserError, match="a smaller --min-samples or --public-samples, now 960, or leave these clients out"
    ):
        partition(owned, "natural", seed=0, public_samples=960, **fractions)


def test_shifts_leave_them_as_they_are():
    federation = partition(numbered(), "iid+invert:1.0+permute:1.0", clients=5, seed=0, public_samples=50)
    assert all((data["train"].x <= 0).all() for data in federation.values())
    assert (federation.public_samples.x >= 0).all()
    assert torch.equal(federation.public_samples.y, federation.public_samples.x.flatten().long() % 10)


@pytest.mark.parametrize(
    ("public", "message"),
    [
        (-1, "public_samples is -1, but 0 to 999 training samples of numbered can be public"),
        (1000, "public_samples is 1000, but 0 to 999 training samples of numbered can be public"),
        (900, "100 training samples are enough for 10 .* a smaller --min-samples or --public-samples, now 900"),
    ],
)
def test_refused(public, message):
    with pytest.raises(UserError, match=message):
        partition(numbered(), "iid", clients=20, seed=0, public_samples=public)


@pytest.fixture
def own(tmp_path):
    """Every third of 60 samples is sensitive, and so are all samples of label 2."""
    rng = np.random.default_rng(0)
    path = tmp_path / "own.csv"
    rows = [f"{i},{rng.normal()},{2 if i % 6 == 0 else i % 2},h{i % 4},{int(i % 3 == 0)}" for i in range(60)]
    path.write_text("\n".join(["v,w,label,site,secret", *rows]))
    return str(path), {"client_column": "site", "sensitive_column": "secret"}


@pytest.mark.parametrize("spec", ["natural", "iid"])
def test_sensitive_samples_are_never_public(own, spec):
    path, columns = own
    dataset = load(path, **columns)
    num_open = int((~dataset.is_sensitive).sum())
    fractions = {"min_samples": 1, "val_fraction": 0, "test_fraction": 0}
    federation = partition(dataset, spec, clients=4, seed=3, public_samples=num_open - 4, **fractions)
    indices = (dataset.train.x[:, None] == federation.public_samples.x[None]).all(-1).float().argmax(0)
    assert len(indices.unique()) == num_open - 4
    assert not dataset.is_sensitive[indices].any()
    assert sum(len(data["train/high"].y) for data in federation.values()) == int(dataset.is_sensitive.sum())
    with pytest.raises(UserError, match=f"public_samples is {num_open + 1}, but 0 to {num_open} training samples"):
        partition(dataset, spec, clients=4, seed=3, public_samples=num_open + 1, **fractions)


class TestOwnTensors:
    samples = Samples(torch.arange(6.0)[:, None], torch.arange(6) % 2)

    def federation(self, public) -> Federation:
        return Federation.from_clients({"a": {"train": self.samples}}, self.samples, ("x", "y"), public_samples=public)

    def test_public_samples_are_given_separately(self):
        federation = self.federation((self.samples.x[:3], self.samples.y[:3]))
        assert federation.public_samples.y.tolist() == [0, 1, 0]
        assert federation.to("cpu").public_samples.x.flatten().tolist() == [0, 1, 2]
        assert self.federation(None).public_samples is None
        assert self.federation((self.samples.x[:0], self.samples.y[:0])).public_samples is None

    def test_refused(self):
        with pytest.raises(UserError, match=r"public_samples has samples of shape \(2,\)"):
            self.federation((torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)))
        with pytest.raises(UserError, match=r"public_samples has labels .* not all int64 in 0\.\.1"):
            self.federation((torch.zeros(1, 1), torch.tensor([2])))


SEEN: list[Samples | None] = []


def curious(setting):
    """A method that requests 12 public samples."""
    SEEN.append(setting.request_public_samples(12))
    return METHODS["fedavg"](setting)


BASE = {"data": "digits", "clients": 5, "rounds": 1, "fleet": "plain"}


class TestJobs:
    def job(self, **keys):
        return make_job({**BASE, "method": f"{__name__}:curious", **keys})

    def test_a_method_requests_a_number(self):
        assert dry_build(f"{__name__}:curious", {}).num_public_requested == 12
        assert dry_build("fedavg", {}).num_public_requested == 0
        experiment = assemble.assemble_job(self.job())
        assert len(SEEN[-1].y) == 12 == experiment.job.public_samples
        assert SEEN[-1] is experiment.federation.public_samples

    def test_the_job_sets_the_number(self):
        assert len(assemble.assemble_job(self.job(public_samples=40)).federation.public_samples.y) == 40
        assert assemble.assemble_job(self.job(public_samples=0)).federation.public_samples is None
        assert SEEN[-1] is None

    def test_the_number_is_recorded(self, tmp_path):
        result = run_job(make_job(BASE | {"public_samples": 30}), tmp_path / "run")
        assert result["num_public_samples"] == 30
        record = read_run(tmp_path / "run")
        assert record.partition["num_public_samples"] == 30
        assert record.partition["note"] == "30 training samples are public"
        assert record.config["public_samples"] == 30

    def test_a_recipe_resumes_with_the_number_that_the_method_requested(self, tmp_path):
        run_job(self.job(), tmp_path / "run")
        check_same_job(tmp_path / "run", self.job())
        with pytest.raises(UserError, match="was run with public_samples 12, not 7"):
            check_same_job(tmp_path / "run", self.job(public_samples=7))

    def test_refused(self):
        with pytest.raises(UserError, match="public_samples is -1: it must be at least 0"):
            self.job(public_samples=-1)
        federation = partition(load("digits"), "iid", clients=5, seed=0)
        with pytest.raises(UserError, match=r"public_samples is 3, but .* gets a federation"):
            run("fedavg", federation, public_samples=3)
