"""Conversion between models, updates or reports and flat vectors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shoal.types import Params, Report

UNBOUNDED = (-1e30, 1e30)  # bounds of representations without a known range


def flatten_params(params: Params) -> Tensor:
    """Returns the parameters of a model or an update as one vector, in the order of their names."""
    return torch.cat([params[k].detach().reshape(-1).cpu().float() for k in sorted(params)])


def unflatten_params(flat: Tensor, template: Params) -> Params:
    """Returns parameters from the vector of `flatten_params`, with the shapes, dtypes and devices of `template`."""
    names = sorted(template)
    parts = torch.split(flat, [template[k].numel() for k in names])
    return {k: part.view(template[k].shape).to(template[k]) for k, part in zip(names, parts, strict=True)}


def report_row(report: Report) -> dict[str, Tensor]:
    """Returns a report as the columns of a client table: its number of samples, its tensors and its mean metrics."""
    columns = {k: flatten_params(v) for k, v in report.tensors.items()}
    columns |= {k: torch.tensor(total / max(1.0, count)) for k, (total, count) in report.metrics.items()}
    return columns | {"size": torch.tensor(report.counts.get("train", 0))}


def nearest_direction(directions: Tensor, representation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns one weight per direction: 1 for the largest cosine to the representation, and 0 for all others."""
    unit = F.normalize(torch.from_numpy(representation), dim=0)
    cosines = F.normalize(directions.double(), dim=1) @ unit
    return np.eye(len(directions))[int(cosines.argmax())]
