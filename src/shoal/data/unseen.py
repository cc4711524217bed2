"""Which clients are held out of training; where rows have owners, before anything is drawn from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import ClientId


def held_out(clients: int, unseen: int | float) -> int:
    """How many of so many clients are held out: a number of them, or a share. Somebody must be left to train."""
    count = max(1, round(unseen * clients)) if isinstance(unseen, float) else unseen
    if unseen <= 0 or count >= clients:
        raise UserError(
            f"unseen is {unseen} of {clients} clients; it must be 1 or more, or a share, and leave one to train"
        )
    return count


@dataclass(frozen=True)
class HoldOut:
    """So many of the clients, or such a share of them, by chance."""

    unseen: int | float
    seed: int
    clients: int | None = None  # of the owners of rows, how many take part; None: all
    min_size: int = 10

    def among(self, clients: Sequence[ClientId]) -> frozenset[ClientId]:
        return self._drawn(clients, held_out(len(clients), self.unseen))

    def among_owners(self, owner: Sequence[ClientId]) -> frozenset[ClientId]:
        """Of those who own enough of the rows; nobody, where nobody does."""
        names, rows = np.unique(np.array(owner, dtype=np.str_), return_counts=True)
        large = names[rows >= self.min_size].tolist()
        if not large:
            return frozenset()
        return self._drawn(large, held_out(min(self.clients or len(large), len(large)), self.unseen))

    def _drawn(self, clients: Sequence[ClientId], count: int) -> frozenset[ClientId]:
        rng = np.random.default_rng(derive_seed(self.seed, "unseen"))
        return frozenset(clients[i] for i in rng.choice(len(clients), count, replace=False).tolist())
