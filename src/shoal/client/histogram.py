"""How often each label occurs in a client's training data, with noise on it if asked, before it leaves the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.client.gaussian_mechanism import guarantee, label_noise, noisy_distribution
from shoal.types import Batch, HasOptions, OnlyIf, Phase, Report, Task, Tree, option

RELEASED, EXACT = "released labels", "exact labels"  # in a client's private tree


@dataclass(frozen=True)
class LabelHistogram(HasOptions):
    """The label distribution p_j. `gamma` sets Gaussian noise of deviation gamma / classes on every entry (paper
    002, Eq. 4); what falls below 0 is cut off and the rest scaled to sum to 1. What was released once is kept and
    released again when asked again: fresh noise each time could be averaged away. Only when more than a share `anew` of
    the labels are others than then (1: never) is there a new release, which adds to what is known of the client; that
    there is one tells that so many labels have changed, and no noise hides this."""

    classes: int
    gamma: float = option(
        0.0,
        "Add Gaussian noise with standard deviation gamma / number of classes to each reported label distribution. "
        "0 adds no noise.",
        ge=0,
    )
    anew: float = option(
        1.0,
        "Draw new noise for a label distribution only after more than this fraction of the client's labels has "
        "changed. With 1 the first noisy release is always sent again.",
        ge=0,
        le=1,
        only_if=OnlyIf("{group}.gamma is above 0", lambda program: program.gamma > 0),
    )
    split: str = "train"  # what the client trains on
    name: str = "represent"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"counts": torch.zeros(self.classes), "kept": {k: private[k] for k in (RELEASED, EXACT) if k in private}}

    def step(self, s: Tree, b: Batch) -> Tree:
        each = torch.arange(self.classes, device=b.y.device)
        return s | {"counts": s["counts"].to(b.w.device) + ((b.y[:, None] == each) * b.w[:, None]).sum(0)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        p = state["counts"].cpu().double() / state["counts"].sum().clamp(min=1).cpu().double()
        kept: Tree | None = None
        if self.gamma and self._stands(p, state["kept"]):
            p = state["kept"][RELEASED]
        elif self.gamma:
            noisy = noisy_distribution(p, label_noise(self.gamma, self.classes), task.seed)
            kept = {RELEASED: noisy.float(), EXACT: p.float()}
            p = noisy
        return Report({"labels": {"p": p.float()}}, {}, {"train": counts[self.split]}), kept

    def _stands(self, p: Tensor, kept: Tree) -> bool:
        """Whether what was released still tells of these labels."""
        return RELEASED in kept and float((p - kept[EXACT]).abs().sum() / 2) <= self.anew

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int = 1) -> dict[str, float]:
        """With `anew` every task may find other labels and lead to a new release."""
        releases = max(1, num_tasks) if self.anew < 1 else 1
        return guarantee(self.gamma, self.classes, num_train_samples, releases=releases) if self.gamma else {}
