import math

import pytest
import torch

from shoal.metrics import Score, macro_f1, mean_of_pair, mean_over_clients, sum_pairs, summarise_clients


def test_pairs_are_not_means_of_means():
    # 1 of 1 and 0 of 9: the mean over samples is 0.1, the mean of means would be 0.5
    assert mean_of_pair(sum_pairs([(1, 1), (0, 9)])) == pytest.approx(0.1)
    assert mean_of_pair(sum_pairs([])) is None
    assert mean_over_clients([{"loss": (2.0, 4.0)}, {}, {"loss": (1.0, 2.0)}], "loss") == pytest.approx(0.5)


def test_macro_f1_by_hand():
    # class 0: 3 hits, 4 predicted, 5 actual -> 2*3/9; class 1: 1 hit, 2 predicted, 1 actual -> 2/3; class 2 absent
    f1 = macro_f1(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([4.0, 2.0, 1.0]), torch.tensor([5.0, 1.0, 0.0]))
    assert f1 == pytest.approx((6 / 9 + 2 / 3) / 2)


def test_macro_f1_of_a_class_without_hits_is_zero():
    assert macro_f1(torch.tensor([0.0]), torch.tensor([0.0]), torch.tensor([4.0])) == 0
    assert macro_f1(torch.zeros(3), torch.zeros(3), torch.zeros(3)) is None


def test_macro_f1_agrees_with_scikit_learn():
    from sklearn.metrics import f1_score

    g = torch.Generator().manual_seed(3)
    y, prediction = (torch.randint(0, 5, (200,), generator=g) for _ in range(2))
    classes = torch.arange(5)
    actual, predicted = (y[:, None] == classes).float(), (prediction[:, None] == classes).float()
    f1 = macro_f1((actual * predicted).sum(0), predicted.sum(0), actual.sum(0))
    assert f1 == pytest.approx(f1_score(y, prediction, average="macro"))


def test_summary_by_hand():
    scores = [Score(a, loss=1 - a, f1=a / 2, num_samples=10) for a in (0.2, 0.4, 0.6, 0.8)]
    s = summarise_clients(scores)
    assert s is not None
    assert s.local == pytest.approx(0.5)
    assert s.std == pytest.approx(math.sqrt(0.05))  # mean of .09 .01 .01 .09
    assert s.worst10 == pytest.approx(0.2)  # a tenth of four clients is one client
    assert s.f1 == pytest.approx(0.25)
    assert s.loss == pytest.approx(0.5)
    assert summarise_clients([]) is None


def test_worst_tenth_of_twenty_is_two():
    s = summarise_clients([Score(i / 20, 0, 0, 1) for i in range(20)])
    assert s is not None
    assert s.worst10 == pytest.approx((0 + 1 / 20) / 2)
