"""How often each class occurs with a client: counted, or estimated where there are no labels; and what it is good for.

A model that was taught with prior t says log p(x|y) + log t_y, up to what all classes have in common. A client whose
classes occur with prior p is best answered by logits + log p - log t, whatever the model: no training is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.client.train import LocalTraining
from shoal.models import Model
from shoal.types import LABEL_COUNTS, UNLABELLED_SPLIT, Batch, HasOptions, Params, Phase, Report, Task, Tree, option

PRIOR = "prior"  # beside the models that a client is served: what each of them was taught, by its name
GLOBAL = "global"


def mixed_prior(counts: Tensor, lam: float) -> Tensor:
    """The distribution of `counts` [..., classes], with a share `lam` of equal classes; equal where there are none."""
    total, equal = counts.sum(-1, keepdim=True), 1 / counts.shape[-1]
    p = torch.where(total > 0, counts / total.clamp(min=1e-12), equal)
    return (1 - lam) * p + lam * equal


def smoothed_prior(counts: Tensor, alpha: float) -> Tensor:
    """(n_c + α) / (n + α C)"""
    return (counts + alpha) / (counts.sum(-1, keepdim=True) + alpha * counts.shape[-1])


def correction(models: Mapping[str, Params], private: Tree, alpha: float, name: str = GLOBAL) -> Tensor | None:
    """What is added to a model's logits: log of the client's prior over what that model was taught. None, or nothing
    where all counts are 0, for whoever knows nothing of its classes."""
    if LABEL_COUNTS not in private:
        return None
    counts = private[LABEL_COUNTS]
    prior = smoothed_prior(counts, alpha).log()
    shift = prior - models[PRIOR][name].log() if PRIOR in models else prior
    return torch.where(counts.sum() > 0, shift, 0.0)


@dataclass(frozen=True)
class CountLabels:
    """A client counts its training labels and keeps the counts; nothing of them is told."""

    classes: int
    device: str = "cpu"
    name: str = "prior"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"counts": torch.zeros(self.classes, device=self.device)}

    def step(self, s: Tree, b: Batch) -> Tree:
        each = torch.arange(self.classes, device=b.y.device)
        return s | {"counts": s["counts"] + ((b.y[:, None] == each) * b.w[:, None]).sum(0)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(), {LABEL_COUNTS: state["counts"]}


@dataclass(frozen=True)
class AdjustedTraining(LocalTraining):
    """Cross-entropy of logits + log prior, so that a model learns what tells classes apart and not how often they occur
    here. The prior is the client's own, mixed with a share `lam` of equal classes, without which a class that it does
    not hold would be free to take any value. Who has not counted its labels trains as usual."""

    lam: float = option(
        0.3,
        "Mix this fraction of the uniform distribution into the client's class prior, which adjusts the logits in "
        "training. 1 trains without adjustment.",
        gt=0,
        le=1,
    )

    def begin(self, task: Task, private: Tree) -> Tree:
        counts = private.get(LABEL_COUNTS, torch.zeros(self.model.num_classes, device=self.model.device))
        return super().begin(task, private) | {"shift": mixed_prior(counts, self.lam).log()}

    def said(self, params: Params, s: Tree, b: Batch) -> tuple[Tensor, Params]:
        logits, buffers = super().said(params, s, b)
        return logits + s["shift"], buffers


def expected(log_prior: Tensor, log_told: Tensor, w: Tensor) -> Tensor:
    """How many of the rows are of each class, if classes occur with that prior: [classes] (Saerens, E step). `log_told`
    [rows, classes] is log p(x|y) up to a constant of each row; rows of weight 0 do not count."""
    return (torch.softmax(log_told + log_prior, dim=-1) * w[:, None]).sum(0)


def likelier(log_prior: Tensor, log_before: Tensor, log_told: Tensor, w: Tensor) -> Tensor:
    """By how much inputs are likelier with one prior than with another: the mean log ratio over rows."""
    gain = torch.logsumexp(log_told + log_prior, dim=-1) - torch.logsumexp(log_told + log_before, dim=-1)
    return (gain * w).sum() / w.sum().clamp(min=1)


@dataclass(frozen=True)
class EstimatePrior(HasOptions):
    """A client without labels estimates how often its classes occur from what the global model says of its inputs, by
    EM, and keeps that as it would keep counts. Nothing is told. Each pass over the inputs is one iteration.

    Guarded: every class is taken to have `alpha` rows more, so that few inputs say little. Where the estimate makes
    inputs likelier than the prior that the model was taught by no more than `guard` nats a row beyond what it would by
    fitting chance, which is (classes - 1) / 2 nats over all rows, counts of 0 are kept: an earlier estimate is
    forgotten.
    """

    model: Model
    alpha: float = option(
        0.1, "Add this many samples of every class to the estimated label counts of a client without labels.", gt=0
    )
    iterations: int = option(
        50, "Estimate the class prior of a client without labels by this many iterations of the EM algorithm.", ge=1
    )
    guard: float = option(
        0.1,
        "Use an estimated class prior only if it raises the mean log-likelihood of the inputs by more than this many "
        "nats per sample beyond the gain expected from overfitting.",
    )
    name: str = "estimate"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(UNLABELLED_SPLIT, self.iterations, 2**20, self.step, precompute=self.inputs, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        even = torch.full((self.model.num_classes,), 1 / self.model.num_classes, device=self.model.device)
        lean = task.models[PRIOR][GLOBAL] if PRIOR in task.models else even
        kept = {"model": task.models[GLOBAL], "taught": lean}
        return kept | {"prior": lean, "counts": torch.zeros_like(lean), "gain": torch.zeros((), device=lean.device)}

    def inputs(self, s: Tree, x: Tensor) -> Tensor:
        return F.log_softmax(self.model.predict(s["model"], x), dim=-1) - s["taught"].log()

    def step(self, s: Tree, b: Batch) -> Tree:
        counts = expected(s["prior"].log(), b.x, b.w)
        prior = smoothed_prior(counts, self.alpha)
        return s | {"prior": prior, "counts": counts, "gain": likelier(prior.log(), s["taught"].log(), b.x, b.w)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        by_chance = (self.model.num_classes - 1) / (2 * max(1, counts[UNLABELLED_SPLIT]))
        sure = float(state["gain"]) > self.guard + by_chance
        return Report(), {LABEL_COUNTS: state["counts"] * sure}
