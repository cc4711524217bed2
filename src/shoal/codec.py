"""Encodes trees, tasks and reports in one format for messages and files: safetensors, with names in the header.

All numbers (config, metrics, counts, seeds) are encoded as tensors, so the size of a message depends on its shape only.
`task_bytes` and `report_bytes` therefore return the size without encoding anything, and a simulation counts exactly the
bytes that a deployment sends. Pickle is never used, because reading it can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from shoal import tree
from shoal.errors import UserError, quote_reason
from shoal.types import Params, Report, Task, Tree


class MissingModel(Exception):
    """A task refers to a cached model that the client no longer has."""


def pack(t: Mapping[str, Any], meta: object = None) -> bytes:
    """Returns the encoding of a tree, with `meta` as JSON in the header."""
    flat: dict[str, Tensor] = {}
    seen_storages: set[int] = set()
    for name, x in sorted(tree.flatten(t).items()):
        x = x.detach().cpu().contiguous()
        storage_address = x.untyped_storage().data_ptr()
        flat[name] = x.clone() if storage_address in seen_storages else x  # the format rejects shared memory
        seen_storages.add(storage_address)
    return save(flat, {"shoal": _text(meta)})


def unpack(data: bytes, source: str = "the message") -> tuple[Tree, Any]:
    """Returns the tree and the metadata of an encoding. The bytes may come from anyone.

    Parameters
    ----------
    data
        The encoding.
    source
        What the bytes are, for the error.

    Raises
    ------
    UserError
        If the bytes are not an encoding.
    """
    try:
        flat = load(data)  # reads no more than the bytes that are there, whatever the header claims
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta = json.loads(header["__metadata__"]["shoal"])
    except KeyError as error:
        raise UserError(f"{source} is damaged: {error} is missing.") from None
    except Exception as error:  # safetensors and PyTorch raise errors of many kinds
        raise UserError(f"{source} is damaged: {quote_reason(error)}.") from None
    try:
        return tree.unflatten({k: flat[k] for k in sorted(flat)}), meta
    except UserError as error:
        raise UserError(f"{source} is damaged: {error}") from None


def _text(meta: object) -> str:
    return json.dumps(meta, sort_keys=True, separators=(",", ":"))


def packed_bytes(t: Mapping[str, Any], meta: object = None) -> int:
    """Returns `len(pack(t, meta))`. Only one tree of each shape is really packed."""
    return _packed_bytes(tree.signature(t), _text(meta))


@lru_cache(maxsize=4096)
def _packed_bytes(signature: tuple[Any, ...], text: str) -> int:
    def blank(part: tuple[Any, ...]) -> Tree:
        return {p[0]: blank(p[1]) if len(p) == 2 else torch.empty(p[1], dtype=p[2]) for p in part}

    return len(pack(blank(signature), json.loads(text)))


def _numbers(values: Mapping[str, float]) -> Tensor:
    return torch.tensor([float(values[k]) for k in sorted(values)], dtype=torch.float64)


def _task_tree(task: Task) -> tuple[Tree, object]:
    sent = {k: m for k, m in task.models.items() if k not in task.cached}
    t: Tree = {"models": sent, "config": _numbers(task.config), "seed": torch.tensor(task.seed)}
    if not task.digests:
        return t, sorted(task.config)
    t["digests"] = torch.tensor([task.digests[k] for k in sorted(task.digests)])
    return t, [sorted(task.config), sorted(task.digests)]


def encode_task(task: Task) -> bytes:
    """Returns the message for a task, without the models that the client has cached."""
    return pack(*_task_tree(task))


def decode_task(data: bytes, cached_models: Mapping[int, Params] | None = None) -> Task:
    """Returns the task of a message.

    Parameters
    ----------
    data
        The message.
    cached_models
        The models that the client has cached from earlier tasks, by digest.

    Raises
    ------
    MissingModel
        If the client lacks a model that the server expects to be cached.
    UserError
        If the message is not a task.
    """
    t, names = unpack(data)
    models, digests, cached_models = _subtree(t, "models"), {}, cached_models or {}
    _require(all(isinstance(model, dict) for model in models.values()), "'models' must have a tree for each model")
    if "digests" in t:
        _require(isinstance(names, list) and len(names) == 2, "its metadata must be two lists of names")
        names, model_names = names
        digests = _named(model_names, _numbers_of(t, "digests", torch.int64, 1), "digests")
    cached = frozenset(digests.keys() - models.keys())
    if any(digests[k] not in cached_models for k in cached):
        raise MissingModel
    models = {k: models[k] if k in models else cached_models[digests[k]] for k in sorted(models.keys() | cached)}
    config = _named(names, _numbers_of(t, "config", torch.float64, 1), "config")
    return Task(models, config, _numbers_of(t, "seed", torch.int64, 0), digests, cached)


def task_bytes(task: Task) -> int:
    """Returns the number of bytes of the message for a task."""
    return packed_bytes(*_task_tree(task))


def _report_tree(report: Report) -> tuple[Tree, object]:
    pairs = [report.metrics[k] for k in sorted(report.metrics)]
    counts = [int(report.counts[k]) for k in sorted(report.counts)]
    t: Tree = {
        "tensors": dict(report.tensors),
        "metrics": torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2),
        "counts": torch.tensor(counts, dtype=torch.int64),
        "flops": torch.tensor(report.flops),
    }
    return t, [sorted(report.metrics), sorted(report.counts)]


def encode_report(report: Report) -> bytes:
    """Returns the message for a report."""
    return pack(*_report_tree(report))


def decode_report(data: bytes) -> Report:
    """Returns the report of a message.

    Only the form is checked here. Whether the numbers are plausible is a question to the aggregation.

    Raises
    ------
    UserError
        If the message is not a report.
    """
    t, names = unpack(data)
    _require(isinstance(names, list) and len(names) == 2, "its metadata must be two lists of names")
    pairs = _numbers_of(t, "metrics", torch.float64, 2)
    _require(all(len(pair) == 2 for pair in pairs), "'metrics' must have two numbers for each metric")
    return Report(
        _subtree(t, "tensors"),
        _named(names[0], [(float(total), float(weight)) for total, weight in pairs], "metrics"),
        _named(names[1], _numbers_of(t, "counts", torch.int64, 1), "counts"),
        _numbers_of(t, "flops", torch.int64, 0),
    )


def _require(is_valid: bool, sentence: str) -> None:
    if not is_valid:
        raise UserError(f"the message is damaged: {sentence}.")


def _subtree(t: Tree, key: str) -> Tree:
    """Returns the tree of a key. An empty tree has no bytes in a message, so the key may be missing."""
    subtree = t.get(key, {})
    _require(isinstance(subtree, dict), f"{key!r} must be a tree")
    return subtree


def _numbers_of(t: Tree, key: str, dtype: torch.dtype, num_axes: int) -> Any:
    """Returns the numbers of a key, as lists for its axes."""
    _require(key in t, f"{key!r} is missing")
    numbers = t[key]
    is_valid = isinstance(numbers, Tensor) and numbers.dtype == dtype and numbers.ndim == num_axes
    _require(is_valid, f"{key!r} must be a tensor of {dtype} with {num_axes} axes")
    return numbers.tolist()


def _named(names: Any, values: list[Any], key: str) -> dict[str, Any]:
    """Returns the values by name."""
    is_valid = isinstance(names, list) and all(isinstance(name, str) and _is_unicode(name) for name in names)
    _require(is_valid, f"the names of {key!r} must be a list of texts")
    _require(len(names) == len(set(names)) == len(values), f"{key!r} must have one value for each name")
    return dict(zip(names, values, strict=True))


def _is_unicode(text: str) -> bool:
    """Returns whether a text can be written. JSON permits halves of characters, which nothing else does."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def report_bytes(report: Report) -> int:
    """Returns the number of bytes of the message for a report."""
    return packed_bytes(*_report_tree(report))
