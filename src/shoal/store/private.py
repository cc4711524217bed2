"""What clients keep to themselves, for fleets that live in this process.

Between checkpoints new trees are in memory only, so that a killed run loses a round as a whole. At a
checkpoint those that changed go into one file of that round. A client's tree is the one in the newest file
that has it. A file stays until every tree in it has a newer one that all kept checkpoints know. Trees that
are safely on disk leave memory, least recently used first, when there is more than `memory_bytes` of them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote

import torch
from safetensors import safe_open

from shoal import tree
from shoal.codec import pack
from shoal.store.files import write_bytes
from shoal.types import ClientId, Tree

MEMORY_BYTES = 2**30


class PrivateStore(MutableMapping[ClientId, Tree]):
    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self.folder, self.memory_bytes = folder, memory_bytes
        self._device: torch.device | str = "cpu"
        self._memory: OrderedDict[ClientId, Tree] = OrderedDict()
        self._memory_used = 0
        self._changed: set[ClientId] = set()
        self._home: dict[ClientId, int] = {}  # client -> round whose file has its tree
        self._current: dict[int, int] = {}  # round -> trees in its file that are nobody's past
        self._past: dict[int, int] = {}  # round -> the round in which its last tree was replaced

    def __getitem__(self, client: ClientId) -> Tree:
        if client not in self._memory:
            self._remember(client, self._read(client, self._home[client]))
        self._memory.move_to_end(client)
        return self._memory[client]

    def __setitem__(self, client: ClientId, private: Tree) -> None:
        self._remember(client, private)
        self._changed.add(client)

    def __delitem__(self, client: ClientId) -> None:
        raise TypeError("a client's private tree is replaced, never deleted")

    def __iter__(self) -> Iterator[ClientId]:
        return iter(sorted(self._home.keys() | self._changed))

    def __len__(self) -> int:
        return len(self._home.keys() | self._changed)

    def __contains__(self, client: object) -> bool:
        return client in self._home or client in self._changed

    @property
    def files(self) -> list[int]:
        """The rounds whose files hold somebody's present tree."""
        return sorted(self._current)

    def save(self, round: int) -> None:
        """Write what changed since the last save, and forget what does not fit into memory."""
        if self._changed:
            self.folder.mkdir(exist_ok=True)
            write_bytes(self._path(round), pack({c: self._memory[c] for c in sorted(self._changed)}))
            for client in self._changed:
                self._settle(client, round)
            self._changed.clear()
        while self._memory_used > self.memory_bytes and self._memory:
            _, old = self._memory.popitem(last=False)
            self._memory_used -= tree.size_bytes(old)

    def discard_before(self, oldest: int) -> None:
        """Files in which no checkpoint from round `oldest` on would look."""
        for round in [r for r, replaced in self._past.items() if replaced <= oldest]:
            self._path(round).unlink(missing_ok=True)
            del self._past[round]

    def check(self, rounds: list[int]) -> None:
        """ValueError where one of these files is missing or cut short."""
        for round in rounds:
            path = self._path(round)
            if not path.exists():
                raise ValueError(f"{path.name} of the clients' private state is missing")
            header, header_bytes = self._header(round)
            ends = [x["data_offsets"][1] for x in header.values()]
            if path.stat().st_size != 8 + header_bytes + max(ends, default=0):
                raise ValueError(f"{path.name} of the clients' private state is cut short")

    def restore(self, round: int, device: torch.device | str = "cpu") -> None:
        """As it was after this round. Files of later rounds belong to work that will be done again."""
        self.__init__(self.folder, self.memory_bytes)  # type: ignore[misc]
        self._device = device
        for path in sorted(self.folder.glob("round-*.safetensors")):
            written = int(path.stem.split("-")[1])
            if written > round:
                path.unlink()
                continue
            header, _ = self._header(written)
            for client in {unquote(name.split("/")[0]) for name in header}:
                self._settle(client, written)

    def _settle(self, client: ClientId, round: int) -> None:
        old = self._home.get(client)
        self._home[client] = round
        self._current[round] = self._current.get(round, 0) + 1
        if old is not None:
            self._current[old] -= 1
            if self._current[old] == 0:
                del self._current[old]
                self._past[old] = round

    def _remember(self, client: ClientId, private: Tree) -> None:
        if client in self._memory:
            self._memory_used -= tree.size_bytes(self._memory[client])
        self._memory[client] = private
        self._memory.move_to_end(client)
        self._memory_used += tree.size_bytes(private)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _read(self, client: ClientId, round: int) -> Tree:
        prefix = quote(client, safe="*") + "/"
        with safe_open(self._path(round), framework="pt", device=str(self._device)) as f:
            names = sorted(name for name in f.keys() if name.startswith(prefix))  # noqa: SIM118
            return tree.unflatten({name.removeprefix(prefix): f.get_tensor(name) for name in names})

    def _header(self, round: int) -> tuple[dict[str, dict[str, list[int]]], int]:
        with self._path(round).open("rb") as f:
            header_bytes = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(header_bytes))
        header.pop("__metadata__", None)
        return header, header_bytes
