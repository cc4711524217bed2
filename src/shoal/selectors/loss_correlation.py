"""FedCor: selection of the clients whose training reduces the losses of all clients, by the correlation of losses.

Tang et al., "FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous Federated Learning",
CVPR 2022, arXiv 2103.13822. The changes of all clients' losses in a round are one sample of a Gaussian process with a
linear kernel over client embeddings. After the process is fitted, clients are selected one by one. The next client is
the one that would reduce the weighted sum of all losses most if its own loss fell by one standard deviation. Then the
process is conditioned on this client.

| symbol      | here                                                                             |
|-------------|----------------------------------------------------------------------------------|
| Delta l     | `changes`, one row per observed round, not finite if a client did not report     |
| gamma^age   | `weights` of `fit`: older rounds count less                                      |
| mu, Sigma   | `mean_`, `covariance_`                                                           |
| X           | `embedding_`, one row per client                                                 |
| sigma_n     | `noise`                                                                          |
| p_i         | `weights` of `pick`: the weight of the client in the objective                   |
| beta^tau    | `discount`: tau is how often a client was selected since Sigma was last fitted   |

(a) Sigma = X X' + sigma_n^2 I
(b) score_k = beta^tau_k * sum_i p_i Sigma_ik / sqrt(Sigma_kk)
(c) Sigma given k = Sigma - Sigma_.k Sigma_k. / Sigma_kk

Deviations from the paper
-------------------------
- The likelihood is maximised in closed form if all clients reported (Tipping and Bishop, "Probabilistic Principal
  Component Analysis", 1999), without step size or seed. The authors use some hundred steps of Adam from random
  embeddings.
- Missing reports are handled by expectation maximisation, with the closed form as the maximisation step.
- A client that never reported gets the embedding 0, so that it is never preferred.
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
    """Estimates the correlation of the clients' losses. A later `fit` can start from `embedding_`.

    Parameters
    ----------
    dimension : int
        Length of a client's embedding.
    noise : float
        Standard deviation of the noise of loss changes.
    num_em_steps : int
        Number of steps of expectation maximisation if reports are missing.

    Attributes
    ----------
    embedding_ : array of shape (clients, dimension)
        Embedding of each client, X.
    mean_ : array of shape (clients,)
        Mean loss change of each client.
    covariance_ : array of shape (clients, clients)
        Covariance of the loss changes, Sigma.
    """

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
            raise UserError(f"num_em_steps is {self.num_em_steps}; it must be 1 or more")

    def fit(
        self, changes: ArrayLike, weights: ArrayLike | None = None, embedding: ArrayLike | None = None
    ) -> LossCorrelation:
        """Fits the process to the rounds in `changes` by maximum likelihood.

        An earlier `embedding` affects only the estimates of missing reports. With it a client without any report keeps
        its correlation with the others.
        """
        matrix = validated_matrix("changes", changes, "rounds by clients")
        weight = _normalised_weights(weights, len(matrix))
        is_reported = np.isfinite(matrix)
        report_weights = weight @ is_reported
        filled = np.where(is_reported, matrix, 0.0)
        self.mean_ = np.divide(weight @ filled, report_weights, out=np.zeros(matrix.shape[1]), where=report_weights > 0)
        deviations = np.where(is_reported, filled - self.mean_, 0.0)
        x = self._start_embedding(embedding, matrix.shape[1])
        if is_reported.all():  # avoids a matrix of clients by clients, because there are far fewer rounds than clients
            _, singular_values, directions = np.linalg.svd(np.sqrt(weight)[:, None] * deviations, full_matrices=False)
            x = self._embedding_from_eigenpairs(singular_values**2, directions.T)
        else:
            for _ in range(self.num_em_steps):
                values, vectors = np.linalg.eigh(self._expected_square(deviations, is_reported, weight, x))
                x = self._embedding_from_eigenpairs(values[::-1], vectors[:, ::-1])
        self.embedding_ = x
        self.covariance_ = x @ x.T + self.noise**2 * np.eye(len(x))  # (a)
        return self

    def _start_embedding(self, embedding: ArrayLike | None, num_clients: int) -> Floats:
        if embedding is None:
            return np.zeros((num_clients, self.dimension))  # missing reports are then estimated by the mean
        start = validated_matrix("embedding", embedding, "clients by dimensions")
        if start.shape != (num_clients, self.dimension):
            raise UserError(f"embedding has shape {start.shape}; it must be {(num_clients, self.dimension)}")
        return start

    def _embedding_from_eigenpairs(self, values: Floats, vectors: Floats) -> Floats:
        """Returns the most likely X of (a) if the mean square of the deviations has these leading eigenpairs."""
        x = np.zeros((len(vectors), self.dimension))
        rank = min(self.dimension, len(values))
        x[:, :rank] = vectors[:, :rank] * np.sqrt(np.maximum(values[:rank] - self.noise**2, 0.0))
        return x

    def _expected_square(self, deviations: Floats, is_reported: NDArray[np.bool_], weight: Floats, x: Floats) -> Floats:
        """Returns E[deviation deviation'] given the reports, weighted over rounds, under the embedding x."""
        variance = self.noise**2
        is_missing = ~is_reported
        gram = np.einsum("sl,ld,le->sde", is_reported.astype(np.float64), x, x, optimize=True)
        posterior = np.linalg.inv(
            variance * np.eye(self.dimension) + gram
        )  # posterior covariance of the latent vector, divided by the variance
        latent = np.einsum("sde,se->sd", posterior, deviations @ x)
        filled = deviations + is_missing * (latent @ x.T)
        uncertainty = (
            np.sqrt(variance * weight)[:, None, None] * is_missing[:, :, None] * (x @ np.linalg.cholesky(posterior))
        )
        uncertainty = uncertainty.transpose(1, 0, 2).reshape(len(x), -1)
        square: Floats = (
            (filled.T * weight) @ filled + uncertainty @ uncertainty.T + variance * np.diag(weight @ is_missing)
        )
        return square


def pick(covariance: ArrayLike, weights: ArrayLike, available: ArrayLike, k: int, discount: ArrayLike) -> Indices:
    """Returns k clients, selected greedily by the highest score (b), after which the process is conditioned by (c).

    The lower index wins a tie. The losses of all clients count, also of clients that are not available.
    """
    sigma = validated_matrix("covariance", covariance, "clients by clients").copy()
    total = len(sigma)
    if sigma.shape != (total, total):
        raise UserError(f"covariance has shape {sigma.shape}; it must be square")
    objective_weights = validated_amounts("weights", weights, total)
    factor = validated_amounts("discount", discount, total)
    present = available_indices(available, total)
    min_variance = 1e-12 * np.diag(
        sigma
    )  # below this fraction of its variance a client is fully predicted by the others
    remaining = list(present)
    for _ in range(num_selected(k, present)):
        variance = np.diag(sigma)
        is_informative = variance > min_variance
        score = (
            factor * (objective_weights @ sigma) / np.sqrt(np.where(is_informative, variance, 1.0)) * is_informative
        )  # (b)
        best = remaining.pop(int(np.argmax(score[remaining])))
        if is_informative[best]:
            sigma -= np.outer(sigma[:, best], sigma[best]) / sigma[best, best]  # (c)
    return np.setdiff1d(present, remaining)


def _normalised_weights(weights: ArrayLike | None, num_rounds: int) -> Floats:
    weight = np.ones(num_rounds) if weights is None else np.asarray(weights, dtype=np.float64)
    if weight.shape != (num_rounds,) or not np.isfinite(weight).all() or (weight < 0).any() or not weight.any():
        raise UserError(f"weights is {weights!r}; it must hold {num_rounds} numbers of 0 or more, not all of them 0")
    normalised: Floats = weight / weight.sum()
    return normalised
