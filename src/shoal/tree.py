"""Functions on trees: nested dicts with tensors at the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from shoal.errors import UserError, shorten
from shoal.types import Tree

MAX_DEPTH = 32  # of a tree that is read; the trees of methods have a depth of 5


@lru_cache(maxsize=100_000)
def _quote_name(name: str) -> str:
    return quote(name, safe="*")


def map_leaves(f: Callable[..., Any], *trees: Mapping[str, Any]) -> Tree:
    """Returns the tree of `f` applied to the corresponding leaves of trees of the same shape."""
    first = trees[0]
    return {
        k: map_leaves(f, *(t[k] for t in trees)) if isinstance(v, Mapping) else f(*(t[k] for t in trees))
        for k, v in first.items()
    }


def leaves(t: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the leaves."""
    for v in t.values():
        if isinstance(v, Mapping):
            yield from leaves(v)
        else:
            yield v


def signature(t: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the names, shapes and types of the leaves. Trees with equal signatures can be stacked."""
    return tuple(
        (k, tuple(v.shape), v.dtype) if isinstance(v, Tensor) else (k, signature(v)) for k, v in sorted(t.items())
    )


def size_bytes(t: Mapping[str, Any]) -> int:
    """Returns the memory of the leaves in bytes."""
    return sum(x.numel() * x.element_size() for x in leaves(t))


def to_device(t: Mapping[str, Any], device: torch.device | str) -> Tree:
    """Returns the tree with its leaves on the device."""
    return map_leaves(lambda x: x.to(device), t)


def flatten(t: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Returns a dict from paths, with parts joined by "/", to leaves. Empty subtrees are lost."""
    flat: dict[str, Tensor] = {}
    for k, v in t.items():
        path = prefix + _quote_name(k)
        if isinstance(v, Tensor):  # tested first, because this test is faster than the test for a mapping
            flat[path] = v
        else:
            flat |= flatten(v, path + "/")
    return flat


def unflatten(flat: Mapping[str, Tensor]) -> Tree:
    """Returns the tree of a dict from paths to leaves.

    Raises
    ------
    UserError
        If the paths are not those of a tree. They may come from a message or from a damaged file.
    """
    t: Tree = {}
    for path, v in flat.items():
        *parents, leaf = path.split("/", MAX_DEPTH)
        if "/" in leaf:
            raise UserError(f"{shorten(path)!r} is nested more than {MAX_DEPTH} times.")
        node = t
        for k in parents:
            node = node.setdefault(unquote(k), {})
            if not isinstance(node, dict):
                raise UserError(f"{unquote(k)!r} is both a tensor and a tree.")
        if (name := unquote(leaf)) in node:
            raise UserError(f"{name!r} occurs twice.")
        node[name] = v
    return t


def skeleton(t: Mapping[str, Any]) -> Tree:
    """Returns the tree with the path of each leaf instead of the leaf. `fill_skeleton` restores the tree from it."""

    def with_paths(t: Mapping[str, Any], prefix: str) -> Tree:
        return {
            k: prefix + _quote_name(k) if isinstance(v, Tensor) else with_paths(v, f"{prefix}{_quote_name(k)}/")
            for k, v in t.items()
        }

    return with_paths(t, "")


def fill_skeleton(structure: Mapping[str, Any], flat: Mapping[str, Any]) -> Tree:
    """Returns the tree with this skeleton and the leaves of `flat`, a dict from paths to leaves.

    In contrast to `unflatten`, it restores empty subtrees and the order of names.
    """
    return {k: fill_skeleton(v, flat) if isinstance(v, Mapping) else flat[v] for k, v in structure.items()}


def weighted_mean(trees: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Tree:
    """Returns the weighted mean of the trees, leaf by leaf.

    Parameters
    ----------
    trees
        Trees of the same shape. The mean of integers, such as batch counters, is rounded to an integer.
    weights
        One weight per tree. They are scaled to sum to 1.

    Raises
    ------
    ValueError
        If the weights do not have a positive sum.
    """
    total = float(sum(weights))
    if total <= 0:
        raise ValueError("weighted_mean needs a positive total weight")
    w = torch.tensor([x / total for x in weights], dtype=torch.float64)

    def mean(*xs: Tensor) -> Tensor:
        if xs[0].is_floating_point():
            return torch.tensordot(w.to(xs[0]), torch.stack(xs), dims=1)
        return torch.tensordot(w, torch.stack(xs).double().cpu(), dims=1).round().to(xs[0])

    return map_leaves(mean, *trees)


def max_abs_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Returns the largest absolute difference between two trees, or infinity if their shapes differ."""
    if signature(a) != signature(b):
        return float("inf")
    flat_a, flat_b = flatten(a), flatten(b)
    gaps = (float((x.double() - flat_b[k].double()).abs().max()) for k, x in flat_a.items() if x.numel())
    return max(gaps, default=0.0)
