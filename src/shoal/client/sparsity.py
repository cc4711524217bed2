"""SPRE: how often each channel of a ReLU is zero over a client's data (FedEPC, paper 000, Sec. 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.rng import derive_seed, generator
from shoal.types import Batch, Phase, Report, Task, Tree


@dataclass(frozen=True)
class Sparsity:
    """The vector s of Eq. (2), after `adaptation.epochs` of training from the received model.

    Zeros are counted for each row and averaged over rows (Eq. 1 knows one feature map only). Four vectors leave: that
    of the adapted model, and those of the received one over all rows and over either half of them, by which the server
    can tell a difference between clients from chance. (Not so the adapted ones: training for itself makes a client
    differ from another with the same data.) `noise` is the deviation of Gaussian noise on every number that leaves.
    """

    adaptation: LocalTraining
    layer: str = "last"
    noise: float = 0.0
    name: str = "represent"

    def __post_init__(self) -> None:
        if self.noise < 0:
            raise UserError(f"{self.name}.noise is {self.noise}; it must not be negative")

    @cached_property
    def place(self) -> int:
        return self.adaptation.model.relu(self.layer)

    @cached_property
    def channels(self) -> int:
        model = self.adaptation.model
        x = torch.zeros(2, *model.input_shape, device=model.device)
        return model.rectified(model.init(0), x, self.place).shape[1]

    @property
    def batchable(self) -> bool:
        return self.adaptation.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        count = Phase("train", 1, 1024, self.step, shuffle=False)
        return (replace(count, finish=self.set_aside), *self.adaptation.phases, count)

    def begin(self, task: Task, private: Tree) -> Tree:
        s = self.adaptation.begin(task, private)
        device = s["loss"].device
        zeros, rows = torch.zeros(2, self.channels, device=device), torch.zeros(2, device=device)
        return s | {"zeros": zeros, "rows": rows, "received": zeros}

    def step(self, s: Tree, b: Batch) -> Tree:
        zero = (self.adaptation.model.rectified(s["params"] | s["buffers"], b.x, self.place) == 0).float()
        each = zero.flatten(2).mean(-1) if zero.dim() > 2 else zero  # [rows, channels]: Eq. (1)
        odd = torch.arange(len(b.w), device=b.w.device) % 2
        halves = torch.stack([b.w * (1 - odd), b.w * odd])  # [2, rows]
        return s | {"zeros": s["zeros"] + halves @ each, "rows": s["rows"] + halves.sum(1)}

    def set_aside(self, s: Tree) -> Tree:
        """Between the received model and the adapted one."""
        zero = torch.zeros_like
        return s | {"received": s["zeros"], "zeros": zero(s["zeros"]), "rows": zero(s["rows"])}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        rows = s["rows"].cpu()
        all_rows, each = rows.sum().clamp(min=1), rows.clamp(min=1)[:, None]
        whole, received = ((s[k].cpu().sum(0) / all_rows)[None] for k in ("zeros", "received"))  # Eq. (2)
        vectors = torch.cat([whole, received, s["received"].cpu() / each])  # [4, channels]
        return Report({"sparsity": {"s": self._noisy(vectors, task.seed)}}, {}, {"train": counts["train"]}), None

    def _noisy(self, vectors: Tensor, seed: int) -> Tensor:
        if not self.noise:
            return vectors
        noise = torch.randn(vectors.shape, generator=generator(derive_seed(seed, "noise")))
        return (vectors + self.noise * noise).clamp(0, 1)
