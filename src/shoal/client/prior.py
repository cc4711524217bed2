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


def mix_with_uniform(counts: Tensor, uniform_mix: float) -> Tensor:
    """The distribution of `counts` [..., classes], with a share `lam` of equal classes; equal where there are none."""
    total, equal = counts.sum(-1, keepdim=True), 1 / counts.shape[-1]
    p = torch.where(total > 0, counts / total.clamp(min=1e-12), equal)
    return (1 - uniform_mix) * p + uniform_mix * equal


def smoothed_prior(counts: Tensor, pseudocount: float) -> Tensor:
    """(n_c + α) / (n + α C)"""
    return (counts + pseudocount) / (counts.sum(-1, keepdim=True) + pseudocount * counts.shape[-1])


def logit_correction(
    models: Mapping[str, Params], private: Tree, pseudocount: float, model_name: str = GLOBAL
) -> Tensor | None:
    """What is added to a model's logits: log of the client's prior over what that model was taught. None, or nothing
    where all counts are 0, for whoever knows nothing of its classes."""
    if LABEL_COUNTS not in private:
        return None
    counts = private[LABEL_COUNTS]
    prior = smoothed_prior(counts, pseudocount).log()
    log_ratio = prior - models[PRIOR][model_name].log() if PRIOR in models else prior
    return torch.where(counts.sum() > 0, log_ratio, 0.0)


@dataclass(frozen=True)
class CountLabels:
    """A client counts its training labels and keeps the counts; nothing of them is told."""

    num_classes: int
    device: str = "cpu"
    name: str = "prior"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("train", 1, 1024, self.step, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        return {"counts": torch.zeros(self.num_classes, device=self.device)}

    def step(self, state: Tree, batch: Batch) -> Tree:
        each = torch.arange(self.num_classes, device=batch.y.device)
        return state | {"counts": state["counts"] + ((batch.y[:, None] == each) * batch.w[:, None]).sum(0)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(), {LABEL_COUNTS: state["counts"]}


@dataclass(frozen=True)
class AdjustedTraining(LocalTraining):
    """Cross-entropy of logits + log prior, so that a model learns what tells classes apart and not how often they occur
    here. The prior is the client's own, mixed with a share `lam` of equal classes, without which a class that it does
    not hold would be free to take any value. Who has not counted its labels trains as usual."""

    uniform_mix: float = option(
        0.3,
        "Mix this fraction of the uniform distribution into the client's class prior, which adjusts the logits in "
        "training. 1 trains without adjustment.",
        gt=0,
        le=1,
    )

    def begin(self, task: Task, private: Tree) -> Tree:
        counts = private.get(LABEL_COUNTS, torch.zeros(self.model.num_classes, device=self.model.device))
        return super().begin(task, private) | {"shift": mix_with_uniform(counts, self.uniform_mix).log()}

    def forward_logits(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, Params]:
        logits, buffers = super().forward_logits(params, state, batch)
        return logits + state["shift"], buffers


def expected_counts(log_prior: Tensor, log_likelihoods: Tensor, w: Tensor) -> Tensor:
    """How many of the rows are of each class, if classes occur with that prior: [classes] (Saerens, E step). `log_told`
    [rows, classes] is log p(x|y) up to a constant of each row; rows of weight 0 do not count."""
    return (torch.softmax(log_likelihoods + log_prior, dim=-1) * w[:, None]).sum(0)


def log_likelihood_gain(log_prior: Tensor, log_baseline_prior: Tensor, log_likelihoods: Tensor, w: Tensor) -> Tensor:
    """By how much inputs are likelier with one prior than with another: the mean log ratio over rows."""
    gain = torch.logsumexp(log_likelihoods + log_prior, dim=-1) - torch.logsumexp(
        log_likelihoods + log_baseline_prior, dim=-1
    )
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
    pseudocount: float = option(
        0.1, "Add this many samples of every class to the estimated label counts of a client without labels.", gt=0
    )
    iterations: int = option(
        50, "Estimate the class prior of a client without labels by this many iterations of the EM algorithm.", ge=1
    )
    min_gain_nats: float = option(
        0.1,
        "Use an estimated class prior only if it raises the mean log-likelihood of the inputs by more than this many "
        "nats per sample beyond the gain expected from overfitting.",
    )
    name: str = "estimate"
    batchable: bool = True

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(UNLABELLED_SPLIT, self.iterations, 2**20, self.step, precompute=self.precompute, shuffle=False),)

    def begin(self, task: Task, private: Tree) -> Tree:
        even = torch.full((self.model.num_classes,), 1 / self.model.num_classes, device=self.model.device)
        training_prior = task.models[PRIOR][GLOBAL] if PRIOR in task.models else even
        kept = {"model": task.models[GLOBAL], "taught": training_prior}
        return kept | {
            "prior": training_prior,
            "counts": torch.zeros_like(training_prior),
            "gain": torch.zeros((), device=training_prior.device),
        }

    def precompute(self, state: Tree, x: Tensor) -> Tensor:
        return F.log_softmax(self.model.predict(state["model"], x), dim=-1) - state["taught"].log()

    def step(self, state: Tree, batch: Batch) -> Tree:
        counts = expected_counts(state["prior"].log(), batch.x, batch.w)
        prior = smoothed_prior(counts, self.pseudocount)
        return state | {
            "prior": prior,
            "counts": counts,
            "gain": log_likelihood_gain(prior.log(), state["taught"].log(), batch.x, batch.w),
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        overfit_nats = (self.model.num_classes - 1) / (2 * max(1, counts[UNLABELLED_SPLIT]))
        is_reliable = float(state["gain"]) > self.min_gain_nats + overfit_nats
        return Report(), {LABEL_COUNTS: state["counts"] * is_reliable}
