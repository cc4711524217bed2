"""Class means compared between clients: what clients report, when clusters are split, and which clients switch."""

import numpy as np
import pytest
import torch

from shoal.client.shift_probe import SumClassFeatures
from shoal.clusterers.conditional_shift import (
    ClassMeans,
    assign_nearest,
    class_means,
    held_out_effect,
    split_clusters_by_shift,
    two_means,
)
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.fleet.vector import VectorFleet
from shoal.models import load_model
from shoal.types import Plan, Samples, Task


def fleet_of(clients=20, classes=5, samples=60, shift=None, alpha=0.3, seed=0, features=8):
    """Counts, sums and squares of Gaussian classes under Dirichlet skew; every other client has shifted centres."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(classes, features))
    count, total, square = (np.zeros((clients, *s)) for s in ((2, classes), (2, classes, features), (features,)))
    for i in range(clients):
        own_centres = shift(centres) if shift is not None and i % 2 else centres
        y = rng.choice(classes, size=samples, p=rng.dirichlet([alpha] * classes))
        x = own_centres[y] + rng.normal(size=(samples, features))
        for half in (0, 1):
            for c in range(classes):
                inside = x[half::2][y[half::2] == c]
                count[i, half, c], total[i, half, c] = len(inside), inside.sum(0)
        square[i] = (x**2).sum(0)
    return count, total, square


def split(sums, max_clusters=2, min_effect=0.1):
    return split_clusters_by_shift(
        class_means(*sums), np.zeros(len(sums[0]), dtype=np.int64), min_effect, 3, max_clusters, 0
    )


SHIFTS = {"permuted": lambda c: c[[1, 2, 3, 4, 0]], "inverted": lambda c: -c, "moved": lambda c: c + 1.0}


class TestSplitClustersByShift:
    @pytest.mark.parametrize("shift", SHIFTS)
    @pytest.mark.parametrize("seed", range(3))
    def test_planted_halves_are_found(self, shift, seed):
        result = split(fleet_of(shift=SHIFTS[shift], seed=seed))
        assert result.labels.tolist() == [0, 1] * 10
        assert result.effect > 0.5 and result.agreement > 0.9

    @pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
    def test_label_skew_is_no_shift(self, alpha):
        """None of twenty fleets is split."""
        splits = [split(fleet_of(alpha=alpha, seed=seed)) for seed in range(20)]
        assert not any(s.labels.any() for s in splits)
        assert abs(np.mean([s.effect for s in splits])) < 0.02

    def test_disjoint_classes_cannot_be_compared(self):
        count, total, square = fleet_of()
        for i in range(20):
            other = [c for c in range(5) if (c < 2) != bool(i % 2)]
            count[i, :, other], total[i, :, other] = 0, 0
        assert not split((count, total, square)).labels.any()

    def test_four_planted_groups_give_four_clusters(self):
        count, total, square = fleet_of(40, samples=100)
        away = np.array([[3.0, 0], [0, 3.0], [-3.0, 0], [0, -3.0]])[np.arange(40) % 4]
        move = np.concatenate([away, np.zeros((40, 6))], 1)
        square = square + 2 * move * total.sum((1, 2)) + move**2 * count.sum((1, 2))[:, None]
        total = total + count[..., None] * move[:, None, None]
        labels = split((count, total, square), max_clusters=6).labels
        assert labels.max() == 3
        assert all(len(set(labels[k::4])) == 1 for k in range(4))
        assert split((count, total, square), max_clusters=2).labels.max() == 1

    def test_splitting_continues_from_given_clusters(self):
        rows = class_means(*fleet_of(shift=SHIFTS["inverted"]))
        labels = np.array([0, 1] * 10)
        assert split_clusters_by_shift(rows, labels, 0.1, 3, 4, 0).labels.tolist() == labels.tolist()

    def test_few_clients_are_not_split(self):
        sums = [x[:6] for x in fleet_of(shift=SHIFTS["inverted"])]
        assert split(sums).labels.tolist() == [0, 1] * 3
        assert not split([x[:5] for x in sums]).labels.any()

    def test_order_and_scale_do_not_matter(self):
        count, total, square = fleet_of(shift=SHIFTS["permuted"])
        order = np.random.default_rng(1).permutation(20)
        result = split((count[order], 7 * total[order], 49 * square[order]))
        assert result.labels.tolist() == (order % 2 != order[0] % 2).astype(int).tolist()
        assert result.effect == pytest.approx(split((count, total, square)).effect)

    def test_without_samples_nothing_is_split(self):
        assert split((np.zeros((8, 2, 3)), np.zeros((8, 2, 3, 4)), np.zeros((8, 4)))).labels.tolist() == [0] * 8

    def test_bad_shapes(self):
        with pytest.raises(UserError, match=r"\(rows, 2, classes\)"):
            class_means(np.zeros((3, 2)), np.zeros((3, 2, 1)), np.zeros((3, 1)))


class TestByHand:
    def test_units(self):
        """One client, one class, one feature: 1, 3 | 5, 7: mean 4, squares 84, within 84 - 64 = 20, variance 20 / 3."""
        every, one, other = class_means([[[2], [2]]], [[[[4]], [[12]]]], [[84]])
        spread = np.sqrt(20 / 3)
        assert [x.mean.item() for x in (every, one, other)] == pytest.approx([4 / spread, 2 / spread, 6 / spread])

    def test_held_out_effect(self):
        """Clusters are 2 apart in one half and 1 in the other, in one of two features: 2 · 1 / 2, same direction."""
        one = ClassMeans(np.full((2, 1), 4.0), np.array([[[0.0, 5]], [[2.0, 5]]]))
        other = ClassMeans(np.full((2, 1), 4.0), np.array([[[3.0, 5]], [[4.0, 5]]]))
        assert held_out_effect(one, other, np.array([0, 1])) == pytest.approx((1.0, 1.0))
        reversed_half = ClassMeans(other.count, other.mean[::-1])
        assert held_out_effect(one, reversed_half, np.array([0, 1])) == pytest.approx((-1.0, -1.0))

    def test_switching_needs_the_margin(self):
        """Centres 0 and 4: a member of the first at 3 is nearer to the second by 9 - 1 of 16, which is half."""
        rows = ClassMeans(np.ones((4, 1)), np.array([[[1.0]], [[3.0]], [[3.0]], [[4.0]]]))
        centres, previous_labels = np.array([[[0.0]], [[4.0]]]), np.array([-1, -1, 0, 0])
        assert assign_nearest(rows, centres, previous_labels, 0.4).tolist() == [0, 1, 1, 1]
        assert assign_nearest(rows, centres, previous_labels, 0.6).tolist() == [0, 1, 0, 1]

    def test_the_first_row_is_on_side_0(self):
        rows = ClassMeans(np.ones((4, 1)), np.array([[[5.0]], [[0.0]], [[0.1]], [[5.1]]]))
        assert two_means(rows, 0).tolist() == [0, 1, 1, 0]


class TestProgram:
    def data(self):
        g = torch.Generator().manual_seed(0)
        return {
            f"c{i}": {"train": Samples(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))}
            for i, n in enumerate((300, 5, 1))
        }

    @pytest.mark.parametrize("name", ["mlp", "linear"])
    @pytest.mark.parametrize("fleet", [PlainFleet, VectorFleet])
    def test_reported_sums(self, name, fleet):
        model, data = load_model(name, (6,), 3), self.data()
        params, program = model.init(1), SumClassFeatures(load_model(name, (6,), 3))
        reports = fleet(data).execute(Plan(program, {c: Task({"global": params}) for c in data}))
        for client, splits in data.items():
            x, y = splits["train"]
            h = model.features(params, x, 256) if name == "mlp" else model.predict(params, x)
            tensors = reports[client].tensors
            torch.testing.assert_close(tensors["square"]["square"], (h**2).sum(0), rtol=1e-4, atol=1e-5)
            for half in (0, 1):
                for c in range(3):
                    inside = h[half::2][y[half::2] == c]
                    assert tensors["count"]["count"][half, c] == len(inside)
                    torch.testing.assert_close(tensors["sum"]["sum"][half, c], inside.sum(0), rtol=1e-4, atol=1e-4)
