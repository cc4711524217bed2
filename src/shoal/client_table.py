"""A table of facts about clients, with a row for each client: one tensor per column instead of one per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.types import ClientId, ServerState, Tree

SEPARATOR = "\0"


@dataclass(frozen=True)
class ClientTable:
    """A table with a row for each client, sorted by client."""

    clients: tuple[ClientId, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # the rows are in the order of `clients`

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.clients)

    @classmethod
    def from_rows(cls, rows: Mapping[ClientId, Mapping[str, Tensor]]) -> ClientTable:
        """Returns a table of these rows, which map column names to values."""
        clients = tuple(sorted(rows))
        if not clients:
            return cls()
        return cls(clients, {k: torch.stack([rows[c][k] for c in clients]) for k in rows[clients[0]]})

    @classmethod
    def load(cls, state: ServerState, slot: str) -> ClientTable:
        """Returns the table that is stored in a memory slot of the server, or an empty table."""
        return cls.from_tree(state.memory.get(slot, {}))

    @classmethod
    def from_tree(cls, stored: Tree) -> ClientTable:
        """Returns the table of a tree that `to_tree` has made. An empty tree gives an empty table."""
        if "clients" not in stored:
            return cls()
        names = bytes(stored["clients"].tolist()).decode().split(SEPARATOR)
        return cls(tuple(names), {k: v for k, v in stored.items() if k != "clients"})

    def to_tree(self) -> Tree:
        """Returns the table as a tree of tensors, for a memory slot of the server."""
        if not self.clients:
            return {}
        names = np.frombuffer(SEPARATOR.join(self.clients).encode(), dtype=np.uint8)
        return {"clients": torch.from_numpy(names.copy()), **self.columns}

    def updated_with(self, other: ClientTable) -> ClientTable:
        """Returns the rows of both tables. For a client that is in both, the row of `other` counts."""
        if not self.clients or not other.clients:
            return other if other.clients else self
        other_clients = set(other.clients)
        own_indices = [i for i, c in enumerate(self.clients) if c not in other_clients]
        clients = [*(self.clients[i] for i in own_indices), *other.clients]
        order = sorted(range(len(clients)), key=clients.__getitem__)
        columns = {k: torch.cat([self[k][own_indices], other[k]])[order] for k in self.columns}
        return ClientTable(tuple(clients[i] for i in order), columns)

    def filter(self, mask: NDArray[np.bool_]) -> ClientTable:
        """Returns the rows for which the mask is true."""
        return ClientTable(
            self.client_ids(np.flatnonzero(mask)), {k: v[torch.from_numpy(mask)] for k, v in self.columns.items()}
        )

    def is_present(self, roster: Sequence[ClientId]) -> NDArray[np.bool_]:
        """Returns for each row whether its client is on the roster."""
        present = set(roster)
        return np.array([c in present for c in self.clients], dtype=bool)

    def client_ids(self, indices: NDArray[np.int64]) -> tuple[ClientId, ...]:
        """Returns the clients of the rows with these indices."""
        return tuple(self.clients[i] for i in indices.tolist())

    def to_dict(self, column: str) -> dict[ClientId, Any]:
        """Returns the value of a column for each client. An empty table gives an empty dict."""
        return dict(zip(self.clients, self.columns[column].tolist(), strict=True)) if self.clients else {}

    def column(self, name: str, clients: Sequence[ClientId]) -> NDArray[np.float64]:
        """Returns the number in a column for each of `clients`, or NaN for a client that is not in the table."""
        values = self.to_dict(name)
        return np.array([values.get(c, np.nan) for c in clients], dtype=np.float64)
