"""What the server keeps about clients, one row each: a few tensors instead of a few for every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import ClientId, ServerState, Tree

BETWEEN = "\0"


@dataclass(frozen=True)
class Table:
    clients: tuple[ClientId, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # rows are clients, in this order

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def of(cls, rows: Mapping[ClientId, Mapping[str, Tensor]]) -> Table:
        clients = tuple(sorted(rows))
        if not clients:
            return cls()
        return cls(clients, {k: torch.stack([rows[c][k] for c in clients]) for k in rows[clients[0]]})

    @classmethod
    def load(cls, state: ServerState, slot: str) -> Table:
        """What a stage has stored under its name; an empty table before that."""
        return cls.read(state.memory.get(slot, {}))

    @classmethod
    def read(cls, t: Tree) -> Table:
        if "clients" not in t:
            return cls()
        names = bytes(t["clients"].tolist()).decode().split(BETWEEN)
        return cls(tuple(names), {k: v for k, v in t.items() if k != "clients"})

    def tree(self) -> Tree:
        if not self.clients:
            return {}
        names = np.frombuffer(BETWEEN.join(self.clients).encode(), dtype=np.uint8)
        return {"clients": torch.from_numpy(names.copy()), **self.columns}

    def merged(self, other: Table) -> Table:
        """The rows of both; where both have a client, that of `other`."""
        if not self.clients or not other.clients:
            return other if other.clients else self
        theirs = set(other.clients)
        mine = [i for i, c in enumerate(self.clients) if c not in theirs]
        clients = [*(self.clients[i] for i in mine), *other.clients]
        order = sorted(range(len(clients)), key=clients.__getitem__)
        columns = {k: torch.cat([self[k][mine], other[k]])[order] for k in self.columns}
        return Table(tuple(clients[i] for i in order), columns)

    def where(self, kept: NDArray[np.bool_]) -> Table:
        return Table(self.named(np.flatnonzero(kept)), {k: v[torch.from_numpy(kept)] for k, v in self.columns.items()})

    def present(self, roster: Sequence[ClientId]) -> NDArray[np.bool_]:
        here = set(roster)
        return np.array([c in here for c in self.clients], dtype=bool)

    def named(self, rows: NDArray[np.int64]) -> tuple[ClientId, ...]:
        return tuple(self.clients[i] for i in rows.tolist())

    def column(self, name: str, clients: Sequence[ClientId]) -> NDArray[np.float64]:
        """One number of each of `clients`; NaN of those who are not in the table."""
        values = dict(zip(self.clients, self.columns[name].tolist(), strict=True)) if self.clients else {}
        return np.array([values.get(c, np.nan) for c in clients], dtype=np.float64)
