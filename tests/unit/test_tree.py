import math

import pytest
import torch

from shoal import tree

A = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3.0)}}
B = {"a": torch.tensor([3.0, 6.0]), "b": {"c": torch.tensor(7.0)}}


def test_map_leaves():
    assert tree.map_leaves(lambda x, y: x + y, A, B)["b"]["c"] == 10


def test_fill_skeleton_restores_empty_subtrees_and_order():
    t = {"z": {}, "a/b": {"y": torch.tensor(1.0), "x": torch.tensor(2.0)}}
    back = tree.fill_skeleton(tree.skeleton(t), tree.flatten(t))
    assert list(back) == ["z", "a/b"]
    assert list(back["a/b"]) == ["y", "x"]
    assert back["a/b"]["x"] is t["a/b"]["x"]


def test_flatten_quotes_special_characters_of_names():
    t = {"a/b": {"c.d": torch.tensor(1.0)}, "%2F": torch.tensor(2.0)}
    flat = tree.flatten(t)
    assert len(flat) == 2
    assert all(k.count("/") <= 1 for k in flat)
    back = tree.unflatten(flat)
    assert set(back) == {"a/b", "%2F"}
    assert tree.max_abs_difference(back, t) == 0


def test_weighted_mean_by_hand():
    # weights 1 and 3: (1*1 + 3*3)/4 = 2.5, (2 + 18)/4 = 5, (3 + 21)/4 = 6
    mean = tree.weighted_mean([A, B], [1, 3])
    assert mean["a"].tolist() == [2.5, 5]
    assert mean["b"]["c"] == 6


def test_weighted_mean_keeps_whole_numbers_whole():
    mean = tree.weighted_mean([{"n": torch.tensor(10)}, {"n": torch.tensor(21)}], [1, 1])
    assert mean["n"].dtype == torch.int64
    assert mean["n"] in (15, 16)


def test_weighted_mean_needs_weight():
    with pytest.raises(ValueError, match="positive"):
        tree.weighted_mean([A], [0])


def test_max_abs_difference_sees_shapes_and_values():
    assert tree.max_abs_difference(A, B) == 4
    assert math.isinf(tree.max_abs_difference(A, {"a": A["a"]}))
    reordered = {"b": A["b"], "a": A["a"]}
    assert tree.max_abs_difference(A, reordered) == 0


def test_size_bytes():
    assert tree.size_bytes(A) == 12
