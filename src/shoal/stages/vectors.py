"""Models, updates and reports as rows of numbers, and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shoal.types import Params, Report

UNBOUNDED = (-1e30, 1e30)  # bounds of representations whose entries are any numbers


def flatten_params(params: Params) -> Tensor:
    """A model or an update as one row of numbers, in the order of its names."""
    return torch.cat([params[k].detach().reshape(-1).cpu().float() for k in sorted(params)])


def unflatten_params(flat: Tensor, template: Params) -> Params:
    """What `vector` made a row of, in the shapes, types and place of `like`."""
    names = sorted(template)
    parts = torch.split(flat, [template[k].numel() for k in names])
    return {k: part.view(template[k].shape).to(template[k]) for k, part in zip(names, parts, strict=True)}


def report_row(report: Report) -> dict[str, Tensor]:
    """A report as columns of a table: its size, its tensors, its mean metrics."""
    found = {k: flatten_params(v) for k, v in report.tensors.items()}
    found |= {k: torch.tensor(total / max(1.0, count)) for k, (total, count) in report.metrics.items()}
    return found | {"size": torch.tensor(report.counts.get("train", 0))}


def nearest_direction(directions: Tensor, representation: NDArray[np.float64]) -> NDArray[np.float64]:
    """All weight to the direction that has the largest cosine with the representation."""
    unit = F.normalize(torch.from_numpy(representation), dim=0)
    cosines = F.normalize(directions.double(), dim=1) @ unit
    return np.eye(len(directions))[int(cosines.argmax())]
