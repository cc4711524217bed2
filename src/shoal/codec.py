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


def unpack(data: bytes) -> tuple[Tree, Any]:
    """Returns the tree and the metadata of an encoding."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    flat = load(data)
    return tree.unflatten({k: flat[k] for k in sorted(flat)}), json.loads(header["__metadata__"]["shoal"])


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
    """
    t, names = unpack(data)
    models, digests, cached_models = t.get("models", {}), {}, cached_models or {}
    if "digests" in t:
        names, model_names = names
        digests = dict(zip(model_names, t["digests"].tolist(), strict=True))
    cached = frozenset(digests.keys() - models.keys())
    if any(digests[k] not in cached_models for k in cached):
        raise MissingModel
    models = {k: models[k] if k in models else cached_models[digests[k]] for k in sorted(models.keys() | cached)}
    config = dict(zip(names, t["config"].tolist(), strict=True))
    return Task(models, config, int(t["seed"]), digests, cached)


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
    """Returns the report of a message."""
    t, (metrics, counts) = unpack(data)
    pairs = [(float(s), float(n)) for s, n in t["metrics"].tolist()]
    return Report(
        t.get("tensors", {}),
        dict(zip(metrics, pairs, strict=True)),
        dict(zip(counts, t["counts"].tolist(), strict=True)),
        int(t["flops"]),
    )


def report_bytes(report: Report) -> int:
    """Returns the number of bytes of the message for a report."""
    return packed_bytes(*_report_tree(report))
