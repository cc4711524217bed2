"""FedCor: clients whose training would lower everybody's loss, from how the clients' losses move together.

Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning",
CVPR 2022, arXiv 2103.13822. The changes of all clients' losses in a round are one draw of a Gaussian process with a
linear kernel over client embeddings. Once it is trained, clients are picked one by one: who would lower the weighted
sum of all losses most if its own loss fell by one standard deviation; then the process is conditioned on that client.

| symbol      | here                                                                             |
|-------------|----------------------------------------------------------------------------------|
| Delta l     | `changes`, one row per round observed, not finite where a client was silent      |
| gamma^age   | `weights` of `fit`: older rounds count less                                      |
| mu, Sigma   | `mean_`, `covariance_`                                                           |
| X           | `embedding_`, one row per client                                                 |
| sigma_n     | `noise`                                                                          |
| p_i         | `weights` of `pick`: the client's share in the objective                         |
| beta^tau    | `discount`: tau is how often a client was chosen since Sigma was last trained    |

(a) Sigma = X X' + sigma_n^2 I
(b) score_k = beta^tau_k * sum_i p_i Sigma_ik / sqrt(Sigma_kk)
(c) Sigma given k = Sigma - Sigma_.k Sigma_k. / Sigma_kk

Deviation: the authors approach the maximum of the likelihood by some hundred steps of Adam from random embeddings.
When everybody reported, that maximum is known in closed form (Tipping and Bishop, "Probabilistic Principal Component
Analysis", 1999): it is taken here, without step size or seed. Silence is filled in by expectation maximisation with
the closed form as its second half. A client that was never heard gets the embedding 0: it is never preferred.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UserError
from shoal.selectors.sampling import (
    Floats,
    Indices,
    available_indices,
    num_selected,
    validated_amounts,
    validated_matrix,
)


@dataclass(eq=False)
class LossCorrelation:
    """How the clients' losses move together. `embedding_` is all that a later `fit` can start from."""

    dimension: int = 15
    noise: float = 0.01
    num_em_steps: int = 20
    embedding_: Floats = field(init=False, repr=False)
    mean_: Floats = field(init=False, repr=False)
    covariance_: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise UserError(f"dimension is {self.dimension}; it must be 1 or more")
        if not self.noise > 0:
            raise UserError(f"noise is {self.noise}; it must be above 0")
        if self.num_em_steps < 1:
            raise UserError(f"steps is {self.num_em_steps}; it must be 1 or more")

    def fit(
        self, changes: ArrayLike, weights: ArrayLike | None = None, embedding: ArrayLike | None = None
    ) -> LossCorrelation:
        """Maximum likelihood over the rounds in `changes`. Only what silent clients would have said depends on an
        earlier `embedding`: a client without a single report keeps its relation to the others."""
        found = validated_matrix("changes", changes, "rounds by clients")
        weight = _normalised_weights(weights, len(found))
        is_reported = np.isfinite(found)
        reports = weight @ is_reported
        known = np.where(is_reported, found, 0.0)
        self.mean_ = np.divide(weight @ known, reports, out=np.zeros(found.shape[1]), where=reports > 0)
        rest = np.where(is_reported, known - self.mean_, 0.0)
        x = self._start_embedding(embedding, found.shape[1])
        if is_reported.all():  # nothing to fill in, and far fewer rounds than clients: no matrix of clients by clients
            _, lengths, directions = np.linalg.svd(np.sqrt(weight)[:, None] * rest, full_matrices=False)
            x = self._embedding_from_eigenpairs(lengths**2, directions.T)
        else:
            for _ in range(self.num_em_steps):
                values, vectors = np.linalg.eigh(self._expected_square(rest, is_reported, weight, x))
                x = self._embedding_from_eigenpairs(values[::-1], vectors[:, ::-1])
        self.embedding_ = x
        self.covariance_ = x @ x.T + self.noise**2 * np.eye(len(x))  # (a)
        return self

    def _start_embedding(self, embedding: ArrayLike | None, num_clients: int) -> Floats:
        if embedding is None:
            return np.zeros((num_clients, self.dimension))  # the silent are filled in by their means
        found = validated_matrix("embedding", embedding, "clients by dimensions")
        if found.shape != (num_clients, self.dimension):
            raise UserError(f"embedding has shape {found.shape}; it must be {(num_clients, self.dimension)}")
        return found

    def _embedding_from_eigenpairs(self, values: Floats, vectors: Floats) -> Floats:
        """The X of (a) that makes deviations most likely if their mean square has these leading eigenpairs."""
        x = np.zeros((len(vectors), self.dimension))
        kept = min(self.dimension, len(values))
        x[:, :kept] = vectors[:, :kept] * np.sqrt(np.maximum(values[:kept] - self.noise**2, 0.0))
        return x

    def _expected_square(self, rest: Floats, is_reported: NDArray[np.bool_], weight: Floats, x: Floats) -> Floats:
        """E[deviation deviation'] given what was heard, weighted over rounds, under the embedding x."""
        variance = self.noise**2
        silent = ~is_reported
        gram = np.einsum("sl,ld,le->sde", is_reported.astype(np.float64), x, x, optimize=True)
        posterior = np.linalg.inv(variance * np.eye(self.dimension) + gram)  # of the latent vector, / variance
        latent = np.einsum("sde,se->sd", posterior, rest @ x)
        filled = rest + silent * (latent @ x.T)
        doubt = np.sqrt(variance * weight)[:, None, None] * silent[:, :, None] * (x @ np.linalg.cholesky(posterior))
        doubt = doubt.transpose(1, 0, 2).reshape(len(x), -1)
        square: Floats = (filled.T * weight) @ filled + doubt @ doubt.T + variance * np.diag(weight @ silent)
        return square


def pick(covariance: ArrayLike, weights: ArrayLike, available: ArrayLike, k: int, discount: ArrayLike) -> Indices:
    """Greedily the client with the highest score (b), then the same under (c); the lower index wins a tie.

    All clients' losses count, also of those who are not available.
    """
    sigma = validated_matrix("covariance", covariance, "clients by clients").copy()
    total = len(sigma)
    if sigma.shape != (total, total):
        raise UserError(f"covariance has shape {sigma.shape}; it must be square")
    share = validated_amounts("weights", weights, total)
    factor = validated_amounts("discount", discount, total)
    there = available_indices(available, total)
    least = 1e-12 * np.diag(sigma)  # below this share of its variance nothing is left to learn from a client
    remaining = list(there)
    for _ in range(num_selected(k, there)):
        variance = np.diag(sigma)
        is_informative = variance > least
        score = factor * (share @ sigma) / np.sqrt(np.where(is_informative, variance, 1.0)) * is_informative  # (b)
        best = remaining.pop(int(np.argmax(score[remaining])))
        if is_informative[best]:
            sigma -= np.outer(sigma[:, best], sigma[best]) / sigma[best, best]  # (c)
    return np.setdiff1d(there, remaining)


def _normalised_weights(weights: ArrayLike | None, num_rounds: int) -> Floats:
    weight = np.ones(num_rounds) if weights is None else np.asarray(weights, dtype=np.float64)
    if weight.shape != (num_rounds,) or not np.isfinite(weight).all() or (weight < 0).any() or not weight.any():
        raise UserError(f"weights is {weights!r}; it must hold {num_rounds} numbers of 0 or more, not all of them 0")
    shares: Floats = weight / weight.sum()
    return shares
