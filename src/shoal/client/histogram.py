"""How often each label occurs in a client's training data, with noise on it if asked, before it leaves the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.client.gaussian_mechanism import label_noise_std, label_privacy_guarantee, noisy_distribution
from shoal.types import Batch, HasOptions, OnlyIf, Phase, Report, Task, Tree, option

RELEASED_LABELS, EXACT_LABELS = "released labels", "exact labels"  # in a client's private tree


@dataclass(frozen=True)
class LabelHistogram(HasOptions):
    """The label distribution p_j. `gamma` sets Gaussian noise of deviation gamma / classes on every entry (paper
    002, Eq. 4); what falls below 0 is cut off and the rest scaled to sum to 1. What was released once is kept and
    released again when asked again: fresh noise each time could be averaged away. Only when more than a share `anew` of
    the labels are others than then (1: never) is there a new release, which adds to what is known of the client; that
    there is one tells that so many labels have changed, and no noise hides this."""

    num_classes: int
    noise_scale: float = option(
        0.0,
        "Add Gaussian noise with standard deviation gamma / number of classes to each reported label distribution. "
        "0 adds no noise.",
        ge=0,
    )
    rerelease_threshold: float = option(
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
        return {
            "counts": torch.zeros(self.num_classes),
            "kept": {k: private[k] for k in (RELEASED_LABELS, EXACT_LABELS) if k in private},
        }

    def step(self, state: Tree, batch: Batch) -> Tree:
        each = torch.arange(self.num_classes, device=batch.y.device)
        return state | {
            "counts": state["counts"].to(batch.w.device) + ((batch.y[:, None] == each) * batch.w[:, None]).sum(0)
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        p = state["counts"].cpu().double() / state["counts"].sum().clamp(min=1).cpu().double()
        new_private: Tree | None = None
        if self.noise_scale and self._is_release_current(p, state["kept"]):
            p = state["kept"][RELEASED_LABELS]
        elif self.noise_scale:
            noisy = noisy_distribution(p, label_noise_std(self.noise_scale, self.num_classes), task.seed)
            new_private = {RELEASED_LABELS: noisy.float(), EXACT_LABELS: p.float()}
            p = noisy
        return Report({"labels": {"p": p.float()}}, {}, {"train": counts[self.split]}), new_private

    def _is_release_current(self, p: Tensor, released: Tree) -> bool:
        """Whether what was released still tells of these labels."""
        return (
            RELEASED_LABELS in released
            and float((p - released[EXACT_LABELS]).abs().sum() / 2) <= self.rerelease_threshold
        )

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int = 1) -> dict[str, float]:
        """With `anew` every task may find other labels and lead to a new release."""
        releases = max(1, num_tasks) if self.rerelease_threshold < 1 else 1
        return (
            label_privacy_guarantee(self.noise_scale, self.num_classes, num_train_samples, num_releases=releases)
            if self.noise_scale
            else {}
        )
