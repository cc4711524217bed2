"""Round-robin selection: a queue in which selected clients go to the end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.selectors.round_robin import num_selected_of, select_in_turn


def rounds(size, k, count, there=None):
    """The clients that are selected in each round."""
    turns, found = np.arange(size), []
    for t in range(count):
        chosen, turns = select_in_turn(turns, np.ones(size, dtype=bool) if there is None else there[t], k)
        found.append(chosen.tolist())
    return found


def test_by_hand():
    # 7 members, 5 a round: 0-4; then 5, 6, 0, 1, 2; then 3, 4, 5, 6, 0
    assert rounds(7, 5, 3) == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 3, 4, 5, 6]]
    assert rounds(3, 1, 4) == [[0], [1], [2], [0]]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_as_many_rounds_as_members_take_each_equally_often(size, k, start):
    k = min(k, size)
    window = rounds(size, k, start + size)[start:]
    assert np.bincount(np.concatenate(window), minlength=size).tolist() == [k] * size


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_a_present_client_waits_at_most_the_length_of_the_queue(size, k, data):
    """However others come and go."""
    waits = -(-size // k)
    there = data.draw(st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=waits, max_size=12))
    always = data.draw(st.integers(0, size - 1))
    masks = [np.array(row) | (np.arange(size) == always) for row in there]
    found = rounds(size, k, len(masks), masks)
    for begin in range(len(found) - waits + 1):
        assert any(always in chosen for chosen in found[begin : begin + waits])
    for chosen, mask in zip(found, masks, strict=True):
        assert len(chosen) == len(set(chosen)) == min(k, mask.sum())
        assert mask[chosen].all()


def test_turns_given_are_not_changed():
    turns = np.array([3, 1, 2])
    chosen, after = select_in_turn(turns, [0, 1, 2], 2)
    assert turns.tolist() == [3, 1, 2]
    assert chosen.tolist() == [1, 2]
    assert after.tolist() == [3, 4, 5]


def test_no_clients():
    assert select_in_turn([], [], 3)[0].tolist() == []
    assert select_in_turn([5, 6], [False, False], 3)[0].tolist() == []


def test_turns_are_integers():
    with pytest.raises(UserError, match="one whole number per client"):
        select_in_turn([0.5], [0], 1)


@pytest.mark.parametrize(("members", "taken"), [(0, 0), (1, 1), (3, 2), (4, 3), (6, 4), (7, 5), (10, 7)])
def test_seventy_percent(members, taken):
    assert num_selected_of(members, 0.7) == taken
