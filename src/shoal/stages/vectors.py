"""Models, updates and reports as rows of numbers, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.types import Params, Report


def vector(params: Params) -> Tensor:
    """A model or an update as one row of numbers, in the order of its names."""
    return torch.cat([params[k].detach().reshape(-1).cpu().float() for k in sorted(params)])


def restored(row: Tensor, like: Params) -> Params:
    """What `vector` made a row of, in the shapes, types and place of `like`."""
    names = sorted(like)
    parts = torch.split(row, [like[k].numel() for k in names])
    return {k: part.view(like[k].shape).to(like[k]) for k, part in zip(names, parts, strict=True)}


def row(report: Report) -> dict[str, Tensor]:
    """A report as columns of a table: its size, its tensors, its mean metrics."""
    found = {k: vector(v) for k, v in report.tensors.items()}
    found |= {k: torch.tensor(total / max(1.0, count)) for k, (total, count) in report.metrics.items()}
    return found | {"size": torch.tensor(report.counts.get("train", 0))}
