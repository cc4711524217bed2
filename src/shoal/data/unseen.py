"""The choice of unseen clients, which are held out of training.

If samples have owners, the clients are chosen before anything is computed from the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import ClientId


def num_held_out(num_clients: int, unseen: int | float) -> int:
    """Returns how many clients are held out, from a number (int) or a fraction (float) of all clients.

    Raises
    ------
    UserError
        If no client is held out, or none is left to train.
    """
    count = max(1, round(unseen * num_clients)) if isinstance(unseen, float) else unseen
    if unseen <= 0 or count >= num_clients:
        raise UserError(
            f"unseen is {unseen} of {num_clients} clients; it must be 1 or more, or a fraction, and leave one to train."
        )
    return count


@dataclass(frozen=True)
class HoldOut:
    """Chooses the unseen clients at random."""

    unseen: int | float  # number, or fraction of all clients
    seed: int
    num_clients: int | None = None  # number of owners that become clients; None: all
    min_samples: int = 10

    def choose_clients(self, clients: Sequence[ClientId]) -> frozenset[ClientId]:
        """Returns the unseen ones of these clients."""
        return self._draw(clients, num_held_out(len(clients), self.unseen))

    def choose_owners(self, owner_of_sample: Sequence[ClientId]) -> frozenset[ClientId]:
        """Returns the unseen ones of the owners with at least `min_samples` samples; empty if no owner has as many."""
        names, counts = np.unique(np.array(owner_of_sample, dtype=np.str_), return_counts=True)
        large = names[counts >= self.min_samples].tolist()
        if not large:
            return frozenset()
        return self._draw(large, num_held_out(min(self.num_clients or len(large), len(large)), self.unseen))

    def _draw(self, clients: Sequence[ClientId], count: int) -> frozenset[ClientId]:
        rng = np.random.default_rng(derive_seed(self.seed, "unseen"))
        return frozenset(clients[i] for i in rng.choice(len(clients), count, replace=False).tolist())
