"""The label distribution of a client's training samples, optionally with noise before it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.client.gaussian_mechanism import label_noise_std, label_privacy_guarantee, noisy_distribution
from shoal.types import Batch, HasOptions, OnlyIf, Phase, Report, Task, Tree, option

RELEASED_LABELS, EXACT_LABELS = "released labels", "exact labels"  # keys of the private state


@dataclass(frozen=True)
class LabelHistogram(HasOptions):
    """Reports the label distribution p_j, optionally with Gaussian noise on every entry (Pereira et al. 2025, Eq. 4).

    A noisy distribution is kept and sent again in later tasks, because the mean of several noisy ones would reveal the
    exact one. A new release follows only if more than the fraction `rerelease_threshold` of the labels has changed. It
    adds to the privacy cost, and it reveals that so many labels have changed, which no noise hides.
    """

    num_classes: int
    noise_scale: float = option(
        0.0,
        "Add Gaussian noise with standard deviation noise_scale / number of classes to each reported label "
        "distribution. 0 adds no noise.",
        ge=0,
    )
    rerelease_threshold: float = option(
        1.0,
        "Draw new noise for a label distribution only after more than this fraction of the client's labels has "
        "changed. With 1 the client always sends its first noisy distribution.",
        ge=0,
        le=1,
        only_if=OnlyIf("{group}.noise_scale is above 0", lambda program: program.noise_scale > 0),
    )
    split: str = "train"  # the samples that the client trains on
    name: str = "represent"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.split, 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {
            "counts": torch.zeros(self.num_classes),
            "released": {k: private[k] for k in (RELEASED_LABELS, EXACT_LABELS) if k in private},
        }

    def step(self, state: Tree, batch: Batch) -> Tree:
        classes = torch.arange(self.num_classes, device=batch.y.device)
        counts = ((batch.y[:, None] == classes) * batch.w[:, None]).sum(0)
        return state | {"counts": state["counts"].to(batch.w.device) + counts}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        p = state["counts"].cpu().double() / state["counts"].sum().clamp(min=1).cpu().double()
        new_private: Tree | None = None
        if self.noise_scale and self._is_release_current(p, state["released"]):
            p = state["released"][RELEASED_LABELS]
        elif self.noise_scale:
            noisy = noisy_distribution(p, label_noise_std(self.noise_scale, self.num_classes), task.seed)
            new_private = {RELEASED_LABELS: noisy.float(), EXACT_LABELS: p.float()}
            p = noisy
        return Report({"labels": {"p": p.float()}}, {}, {"train": counts[self.split]}), new_private

    def _is_release_current(self, p: Tensor, released: Tree) -> bool:
        """Returns True if a release exists and few enough labels have changed since then."""
        return (
            RELEASED_LABELS in released
            and float((p - released[EXACT_LABELS]).abs().sum() / 2) <= self.rerelease_threshold
        )

    def privacy_guarantee(self, num_train_samples: Sequence[int], num_tasks: int = 1) -> dict[str, float]:
        """Returns the guarantees of the noise, empty without noise.

        With a `rerelease_threshold` below 1 every task may lead to a new release.
        """
        num_releases = max(1, num_tasks) if self.rerelease_threshold < 1 else 1
        return (
            label_privacy_guarantee(self.noise_scale, self.num_classes, num_train_samples, num_releases=num_releases)
            if self.noise_scale
            else {}
        )
