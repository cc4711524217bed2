"""Which clients are held out of training; where rows have owners, before anything is drawn from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import ClientId


def num_held_out(num_clients: int, unseen: int | float) -> int:
    """How many of so many clients are held out: a number of them, or a share. Somebody must be left to train."""
    count = max(1, round(unseen * num_clients)) if isinstance(unseen, float) else unseen
    if unseen <= 0 or count >= num_clients:
        raise UserError(
            f"unseen is {unseen} of {num_clients} clients; it must be 1 or more, or a share, and leave one to train"
        )
    return count


@dataclass(frozen=True)
class HoldOut:
    """So many of the clients, or such a share of them, by chance."""

    unseen: int | float
    seed: int
    num_clients: int | None = None  # of the owners of rows, how many take part; None: all
    min_samples: int = 10

    def choose_clients(self, clients: Sequence[ClientId]) -> frozenset[ClientId]:
        return self._draw(clients, num_held_out(len(clients), self.unseen))

    def choose_owners(self, owner_of_sample: Sequence[ClientId]) -> frozenset[ClientId]:
        """Of those who own enough of the rows; nobody, where nobody does."""
        names, rows = np.unique(np.array(owner_of_sample, dtype=np.str_), return_counts=True)
        large = names[rows >= self.min_samples].tolist()
        if not large:
            return frozenset()
        return self._draw(large, num_held_out(min(self.num_clients or len(large), len(large)), self.unseen))

    def _draw(self, clients: Sequence[ClientId], count: int) -> frozenset[ClientId]:
        rng = np.random.default_rng(derive_seed(self.seed, "unseen"))
        return frozenset(clients[i] for i in rng.choice(len(clients), count, replace=False).tolist())
