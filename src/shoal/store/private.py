"""What clients keep to themselves, for fleets that live in this process.

Between checkpoints new trees are in memory only, so that a killed run loses a round as a whole. At a
checkpoint those that changed go into one file of that round; an index tells in which file each client's
latest tree is. Old files stay until no kept checkpoint points into them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from pathlib import Path

import torch

from shoal import tree
from shoal.codec import pack, unpack
from shoal.store.files import write_bytes
from shoal.types import ClientId, Tree


class PrivateStore(MutableMapping[ClientId, Tree]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[ClientId, int] = {}  # client -> round whose file has its tree
        self._memory: dict[ClientId, Tree] = {}
        self._device: torch.device | str = "cpu"
        self._changed: set[ClientId] = set()
        self._read = lru_cache(maxsize=4)(self._read_file)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _read_file(self, round: int) -> Tree:
        return tree.to(unpack(self._path(round).read_bytes())[0], self._device)

    def __getitem__(self, client: ClientId) -> Tree:
        if client not in self._memory:
            self._memory[client] = self._read(self.index[client])[client]
        return self._memory[client]

    def __setitem__(self, client: ClientId, private: Tree) -> None:
        self._memory[client] = private
        self._changed.add(client)

    def __delitem__(self, client: ClientId) -> None:
        self._memory.pop(client, None)
        self._changed.discard(client)
        self.index.pop(client, None)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(sorted(self.index.keys() | self._changed))

    def __len__(self) -> int:
        return len(self.index.keys() | self._changed)

    def save(self, round: int) -> None:
        """Write what changed since the last save."""
        if not self._changed:
            return
        self.folder.mkdir(exist_ok=True)
        write_bytes(self._path(round), pack({c: self._memory[c] for c in sorted(self._changed)}))
        self.index |= dict.fromkeys(self._changed, round)
        self._changed.clear()

    def check(self, index: dict[ClientId, int]) -> None:
        """ValueError where a file that the index points into is missing or cut short."""
        for round in sorted(set(index.values())):
            path = self._path(round)
            if not path.exists():
                raise ValueError(f"{path.name} of the clients' private state is missing")
            with path.open("rb") as f:
                header_bytes = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(header_bytes))
            ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
            if path.stat().st_size != 8 + header_bytes + max(ends, default=0):
                raise ValueError(f"{path.name} of the clients' private state is cut short")

    def restore(self, index: dict[ClientId, int], device: torch.device | str = "cpu") -> None:
        self._device = device
        self.index = dict(index)
        self._memory.clear()
        self._changed.clear()

    def discard_except(self, rounds: set[int]) -> None:
        keep = {self._path(r) for r in rounds}
        for path in self.folder.glob("round-*.safetensors"):
            if path not in keep:
                path.unlink(missing_ok=True)
