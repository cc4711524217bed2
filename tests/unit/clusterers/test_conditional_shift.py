"""Classes compared between clients: what is told of them, when clients are cut in two, and who moves."""

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


def fleet_of(clients=20, classes=5, rows=60, shift=None, alpha=0.3, seed=0, features=8):
    """Counts, sums and squares of Gaussian classes under Dirichlet skew; every other client has shifted centres."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(classes, features))
    count, total, square = (np.zeros((clients, *s)) for s in ((2, classes), (2, classes, features), (features,)))
    for i in range(clients):
        here = shift(centres) if shift is not None and i % 2 else centres
        y = rng.choice(classes, size=rows, p=rng.dirichlet([alpha] * classes))
        x = here[y] + rng.normal(size=(rows, features))
        for half in (0, 1):
            for c in range(classes):
                inside = x[half::2][y[half::2] == c]
                count[i, half, c], total[i, half, c] = len(inside), inside.sum(0)
        square[i] = (x**2).sum(0)
    return count, total, square


def cut(told_by, most=2, threshold=0.1):
    return split_clusters_by_shift(
        class_means(*told_by), np.zeros(len(told_by[0]), dtype=np.int64), threshold, 3, most, 0
    )


SHIFTS = {"permuted": lambda c: c[[1, 2, 3, 4, 0]], "inverted": lambda c: -c, "moved": lambda c: c + 1.0}


class TestDivided:
    @pytest.mark.parametrize("shift", SHIFTS)
    @pytest.mark.parametrize("seed", range(3))
    def test_planted_halves_are_found(self, shift, seed):
        found = cut(fleet_of(shift=SHIFTS[shift], seed=seed))
        assert found.labels.tolist() == [0, 1] * 10
        assert found.effect > 0.5 and found.agreement > 0.9

    @pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
    def test_label_skew_is_no_shift(self, alpha):
        """Twenty fleets each: none is cut."""
        found = [cut(fleet_of(alpha=alpha, seed=seed)) for seed in range(20)]
        assert not any(f.labels.any() for f in found)
        assert abs(np.mean([f.effect for f in found])) < 0.02

    def test_disjoint_classes_cannot_be_compared(self):
        count, total, square = fleet_of()
        for i in range(20):
            other = [c for c in range(5) if (c < 2) != bool(i % 2)]
            count[i, :, other], total[i, :, other] = 0, 0
        assert not cut((count, total, square)).labels.any()

    def test_four_groups_and_no_more(self):
        count, total, square = fleet_of(40, rows=100)
        away = np.array([[3.0, 0], [0, 3.0], [-3.0, 0], [0, -3.0]])[np.arange(40) % 4]
        move = np.concatenate([away, np.zeros((40, 6))], 1)
        square = square + 2 * move * total.sum((1, 2)) + move**2 * count.sum((1, 2))[:, None]
        total = total + count[..., None] * move[:, None, None]
        labels = cut((count, total, square), most=6).labels
        assert labels.max() == 3
        assert all(len(set(labels[k::4])) == 1 for k in range(4))
        assert cut((count, total, square), most=2).labels.max() == 1

    def test_a_cut_goes_on_from_groups_that_there_are(self):
        rows = class_means(*fleet_of(shift=SHIFTS["inverted"]))
        was = np.array([0, 1] * 10)
        assert split_clusters_by_shift(rows, was, 0.1, 3, 4, 0).labels.tolist() == was.tolist()

    def test_a_few_are_no_group(self):
        told_by = [x[:6] for x in fleet_of(shift=SHIFTS["inverted"])]
        assert cut(told_by).labels.tolist() == [0, 1] * 3
        assert not cut([x[:5] for x in told_by]).labels.any()

    def test_order_and_scale(self):
        count, total, square = fleet_of(shift=SHIFTS["permuted"])
        order = np.random.default_rng(1).permutation(20)
        found = cut((count[order], 7 * total[order], 49 * square[order]))
        assert found.labels.tolist() == (order % 2 != order[0] % 2).astype(int).tolist()
        assert found.effect == pytest.approx(cut((count, total, square)).effect)

    def test_nothing_told(self):
        assert cut((np.zeros((8, 2, 3)), np.zeros((8, 2, 3, 4)), np.zeros((8, 4)))).labels.tolist() == [0] * 8

    def test_what_is_refused(self):
        with pytest.raises(UserError, match=r"\(rows, 2, classes\)"):
            class_means(np.zeros((3, 2)), np.zeros((3, 2, 1)), np.zeros((3, 1)))


class TestByHand:
    def test_units(self):
        """One client, one class, one feature: 1, 3 | 5, 7: mean 4, squares 84, within 84 - 64 = 20, variance 20 / 3."""
        every, one, other = class_means([[[2], [2]]], [[[[4]], [[12]]]], [[84]])
        spread = np.sqrt(20 / 3)
        assert [x.mean.item() for x in (every, one, other)] == pytest.approx([4 / spread, 2 / spread, 6 / spread])

    def test_held_out(self):
        """Groups are 2 apart in one half and 1 in the other, in one of two features: 2 · 1 / 2, and in the same way."""
        one = ClassMeans(np.full((2, 1), 4.0), np.array([[[0.0, 5]], [[2.0, 5]]]))
        other = ClassMeans(np.full((2, 1), 4.0), np.array([[[3.0, 5]], [[4.0, 5]]]))
        assert held_out_effect(one, other, np.array([0, 1])) == pytest.approx((1.0, 1.0))
        back = ClassMeans(other.count, other.mean[::-1])
        assert held_out_effect(one, back, np.array([0, 1])) == pytest.approx((-1.0, -1.0))

    def test_who_moves(self):
        """Centres 0 and 4: at 3 a member of the first is nearer to the other by 9 - 1 of 16, which is half."""
        rows = ClassMeans(np.ones((4, 1)), np.array([[[1.0]], [[3.0]], [[3.0]], [[4.0]]]))
        centres, was = np.array([[[0.0]], [[4.0]]]), np.array([-1, -1, 0, 0])
        assert assign_nearest(rows, centres, was, 0.4).tolist() == [0, 1, 1, 1]
        assert assign_nearest(rows, centres, was, 0.6).tolist() == [0, 1, 0, 1]

    def test_the_first_is_in_group_0(self):
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
    def test_what_is_told(self, name, fleet):
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
