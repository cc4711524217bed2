"""What the server keeps about clients, one row each: a few tensors instead of a few for every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import ClientId, ServerState, Tree

SEPARATOR = "\0"


@dataclass(frozen=True)
class ClientTable:
    clients: tuple[ClientId, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # rows are clients, in this order

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def from_rows(cls, rows: Mapping[ClientId, Mapping[str, Tensor]]) -> ClientTable:
        clients = tuple(sorted(rows))
        if not clients:
            return cls()
        return cls(clients, {k: torch.stack([rows[c][k] for c in clients]) for k in rows[clients[0]]})

    @classmethod
    def load(cls, state: ServerState, slot: str) -> ClientTable:
        """What a stage has stored under its name; an empty table before that."""
        return cls.from_tree(state.memory.get(slot, {}))

    @classmethod
    def from_tree(cls, stored: Tree) -> ClientTable:
        if "clients" not in stored:
            return cls()
        names = bytes(stored["clients"].tolist()).decode().split(SEPARATOR)
        return cls(tuple(names), {k: v for k, v in stored.items() if k != "clients"})

    def to_tree(self) -> Tree:
        if not self.clients:
            return {}
        names = np.frombuffer(SEPARATOR.join(self.clients).encode(), dtype=np.uint8)
        return {"clients": torch.from_numpy(names.copy()), **self.columns}

    def updated_with(self, other: ClientTable) -> ClientTable:
        """The rows of both; where both have a client, that of `other`."""
        if not self.clients or not other.clients:
            return other if other.clients else self
        other_clients = set(other.clients)
        own_indices = [i for i, c in enumerate(self.clients) if c not in other_clients]
        clients = [*(self.clients[i] for i in own_indices), *other.clients]
        order = sorted(range(len(clients)), key=clients.__getitem__)
        columns = {k: torch.cat([self[k][own_indices], other[k]])[order] for k in self.columns}
        return ClientTable(tuple(clients[i] for i in order), columns)

    def filter(self, mask: NDArray[np.bool_]) -> ClientTable:
        return ClientTable(
            self.client_ids(np.flatnonzero(mask)), {k: v[torch.from_numpy(mask)] for k, v in self.columns.items()}
        )

    def is_present(self, roster: Sequence[ClientId]) -> NDArray[np.bool_]:
        present = set(roster)
        return np.array([c in present for c in self.clients], dtype=bool)

    def client_ids(self, indices: NDArray[np.int64]) -> tuple[ClientId, ...]:
        return tuple(self.clients[i] for i in indices.tolist())

    def column(self, name: str, clients: Sequence[ClientId]) -> NDArray[np.float64]:
        """One number of each of `clients`; NaN of those who are not in the table."""
        values = dict(zip(self.clients, self.columns[name].tolist(), strict=True)) if self.clients else {}
        return np.array([values.get(c, np.nan) for c in clients], dtype=np.float64)
