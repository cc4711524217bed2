"""How much clients contribute: numbers by hand, and what must hold for any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.selectors.contribution import cosines, lognorm, metrics, shares, with_directions

POSITIVE = st.lists(st.floats(0.001, 1000), min_size=2, max_size=12)


def test_by_hand():
    """For (.2, .4, .4): -log2 is (2.3219, 1.3219, 1.3219), together 4.9658."""
    assert lognorm([0.2, 0.4, 0.4]) == pytest.approx([0.467585, 0.266207, 0.266207], abs=1e-6)
    assert lognorm([0, 1]).tolist() == [1, 0]  # -log2 of 1e-6 and of 1
    assert lognorm([0, 1, 1]) == pytest.approx([0.908807, 0.045596, 0.045596], abs=1e-6)  # 19.93, 1, 1
    assert shares([1, 3]).tolist() == [0.25, 0.75]


@pytest.mark.parametrize("values", [[5, 5, 5, 5], [0, 0, 0, 0], [7], [0]])
def test_equal_clients_have_equal_weights(values):
    assert lognorm(values) == pytest.approx([1 / len(values)] * len(values))
    assert shares(values) == pytest.approx([1 / len(values)] * len(values))


def test_no_clients_have_no_weights():
    assert lognorm([]).shape == shares([]).shape == (0,)
    assert metrics([], [], [], []).shape == (0, 4)


def test_a_negative_number_counts_as_none():
    assert lognorm([-0.5, 1.0]).tolist() == [1, 0]


@given(POSITIVE, st.floats(0.01, 100))
def test_scale_does_not_matter_and_weights_sum_to_one(values, scale):
    found = lognorm(values)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()
    assert lognorm(np.array(values) * scale) == pytest.approx(found, abs=1e-9)


@given(POSITIVE)
def test_a_larger_value_has_a_smaller_weight(values):
    found = lognorm(values)
    order = np.argsort(values, kind="stable")
    part = np.array(values)[order] / np.sum(values)
    clearly = np.diff(part) > 1e-9
    assert (np.diff(found[order])[clearly] < 0).all()


@given(POSITIVE, st.randoms())
def test_a_relabelling_relabels(values, chance):
    order = list(range(len(values)))
    chance.shuffle(order)
    assert lognorm([values[i] for i in order]) == pytest.approx(lognorm(values)[order])


def test_columns_are_samples_rounds_accuracy_and_loss():
    """Samples by share; the other three by logarithm: (1, 1) and (.5, .5) are equal, losses of 1 and 3 are 1/4
    and 3/4, 2 and 0.415 bits."""
    found = metrics([10, 30], [1, 1], [0.5, 0.5], [1, 3])
    assert found == pytest.approx(np.array([[0.25, 0.5, 0.5, 2 / 2.415], [0.75, 0.5, 0.5, 0.415 / 2.415]]), abs=1e-3)
    assert found.sum(0) == pytest.approx([1, 1, 1, 1])


def test_cosines_are_those_of_whole_vectors():
    rows = [[3.0, 4.0], [-3.0, -4.0], [0.0, 0.0], [4.0, -3.0]]
    assert cosines(rows, [3.0, 4.0]) == pytest.approx([1, -1, 0, 0])
    long = np.full((1, 582_026), 0.1, dtype=np.float32)
    assert cosines(long, long[0])[0] <= 1  # single precision gives 1.00001


def test_directions_become_columns_that_sum_to_one():
    found = with_directions(metrics([1, 1], [1, 1], [1, 1], [1, 1]), [[1.0, 1.0], [0.5, 0.25]])
    assert found.shape == (2, 6)
    assert found.sum(0) == pytest.approx(np.ones(6))
    assert found[1, 5] > found[0, 5]  # a client with another direction has more weight


@given(st.integers(1, 6), st.sampled_from([4, 6]), st.randoms())
def test_contributions_are_weights_for_any_coefficients(clients, columns, chance):
    def some():
        return [chance.random() for _ in range(clients)]

    table = metrics(some(), some(), some(), some())
    table = with_directions(table, [some(), some()]) if columns == 6 else table
    a = np.array([0.001 + chance.random() for _ in range(columns)])
    weights = table @ (a / a.sum())
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1, abs=1e-9)


def test_bad_input_is_refused_and_none_is_changed():
    with pytest.raises(UserError, match=r"values has -1\.0 for client 1"):
        shares([1, -1])
    values = np.array([-1.0, 0.0, 2.0])
    lognorm(values)
    assert values.tolist() == [-1, 0, 2]
