"""Class priors of clients: counted, or estimated without labels; and the prior correction of logits.

A model with training prior t has the logits log p(x|y) + log t_y, up to a constant. For a client with class prior p the
best logits are therefore logits + log p - log t. This correction needs no training and fits every model.
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

PRIOR = "prior"  # sent beside the models of a client: the training prior of each model, by its name
GLOBAL = "global"


def mix_with_uniform(counts: Tensor, uniform_mix: float) -> Tensor:
    """Returns the distribution of `counts` [..., classes], mixed with the fraction `uniform_mix` of the uniform one.

    Without counts the distribution is uniform.
    """
    total, uniform = counts.sum(-1, keepdim=True), 1 / counts.shape[-1]
    p = torch.where(total > 0, counts / total.clamp(min=1e-12), uniform)
    return (1 - uniform_mix) * p + uniform_mix * uniform


def smoothed_prior(counts: Tensor, pseudocount: float) -> Tensor:
    """Returns the class prior (n_c + α) / (n + α C), where α is the pseudocount and C the number of classes."""
    return (counts + pseudocount) / (counts.sum(-1, keepdim=True) + pseudocount * counts.shape[-1])


def logit_correction(
    models: Mapping[str, Params], private: Tree, pseudocount: float, model_name: str = GLOBAL
) -> Tensor | None:
    """Returns the correction of a model's logits: log of the client's class prior over the model's training prior.

    It is None for a client without label counts, and 0 if all counts are 0.
    """
    if LABEL_COUNTS not in private:
        return None
    counts = private[LABEL_COUNTS]
    prior = smoothed_prior(counts, pseudocount).log()
    log_ratio = prior - models[PRIOR][model_name].log() if PRIOR in models else prior
    return torch.where(counts.sum() > 0, log_ratio, 0.0)


@dataclass(frozen=True)
class CountLabels:
    """Counts the training labels of a client and keeps the counts in the private state. Nothing is reported."""

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
        classes = torch.arange(self.num_classes, device=batch.y.device)
        return state | {"counts": state["counts"] + ((batch.y[:, None] == classes) * batch.w[:, None]).sum(0)}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(), {LABEL_COUNTS: state["counts"]}


@dataclass(frozen=True)
class AdjustedTraining(LocalTraining):
    """Local training with the cross-entropy of logits + log class prior (logit adjustment).

    The model thus learns to distinguish classes, and not how often they occur at the client. The client's class prior
    is mixed with the uniform distribution, because otherwise the logit of an absent class could take any value. A
    client without label counts trains without adjustment.
    """

    uniform_mix: float = option(
        0.3,
        "Mix this fraction of the uniform distribution into the client's class prior, which adjusts the logits in "
        "training. 1 trains without adjustment.",
        gt=0,
        le=1,
    )

    def begin(self, task: Task, private: Tree) -> Tree:
        counts = private.get(LABEL_COUNTS, torch.zeros(self.model.num_classes, device=self.model.device))
        return super().begin(task, private) | {"log_prior": mix_with_uniform(counts, self.uniform_mix).log()}

    def forward_logits(self, params: Params, state: Tree, batch: Batch) -> tuple[Tensor, Params]:
        logits, buffers = super().forward_logits(params, state, batch)
        return logits + state["log_prior"], buffers


def expected_counts(log_prior: Tensor, log_likelihoods: Tensor, w: Tensor) -> Tensor:
    """Returns the expected number of samples of each class under a class prior (E step of Saerens et al.).

    `log_likelihoods` [samples, classes] is log p(x|y) up to a constant for each sample. Samples of weight 0 do not
    count.
    """
    return (torch.softmax(log_likelihoods + log_prior, dim=-1) * w[:, None]).sum(0)


def log_likelihood_gain(log_prior: Tensor, log_baseline_prior: Tensor, log_likelihoods: Tensor, w: Tensor) -> Tensor:
    """Returns the mean gain in the log-likelihood of the inputs with one prior over a baseline prior."""
    baseline = torch.logsumexp(log_likelihoods + log_baseline_prior, dim=-1)
    gain = torch.logsumexp(log_likelihoods + log_prior, dim=-1) - baseline
    return (gain * w).sum() / w.sum().clamp(min=1)


@dataclass(frozen=True)
class EstimatePrior(HasOptions):
    """Estimates the class prior of a client without labels from the global model's predictions, by EM.

    The expected counts are kept in the private state, as label counts would be. Nothing is reported. Each epoch over
    the inputs is one iteration. Pseudocounts limit what few inputs can change.

    An estimate is used only if it raises the mean log-likelihood of the inputs over that of the training prior by more
    than `min_gain_nats` plus the expected gain of overfitting, which is (classes - 1) / 2 nats over all samples.
    Otherwise the counts are 0, which also replaces an earlier estimate.
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
        uniform = torch.full((self.model.num_classes,), 1 / self.model.num_classes, device=self.model.device)
        training_prior = task.models[PRIOR][GLOBAL] if PRIOR in task.models else uniform
        return {
            "model": task.models[GLOBAL],
            "training_prior": training_prior,
            "prior": training_prior,
            "counts": torch.zeros_like(training_prior),
            "gain": torch.zeros((), device=training_prior.device),
        }

    def precompute(self, state: Tree, x: Tensor) -> Tensor:
        """Returns log p(x|y) up to a constant for each sample."""
        return F.log_softmax(self.model.predict(state["model"], x), dim=-1) - state["training_prior"].log()

    def step(self, state: Tree, batch: Batch) -> Tree:
        counts = expected_counts(state["prior"].log(), batch.x, batch.w)
        prior = smoothed_prior(counts, self.pseudocount)
        return state | {
            "prior": prior,
            "counts": counts,
            "gain": log_likelihood_gain(prior.log(), state["training_prior"].log(), batch.x, batch.w),
        }

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        overfit_nats = (self.model.num_classes - 1) / (2 * max(1, counts[UNLABELLED_SPLIT]))
        is_reliable = float(state["gain"]) > self.min_gain_nats + overfit_nats
        return Report(), {LABEL_COUNTS: state["counts"] * is_reliable}
