"""The clients' private state, for fleets that run in this process.

- Between checkpoints, new trees are in memory. If they take too much memory, they are moved to temporary files.
  A killed run therefore loses a round as a whole.
- At a checkpoint, the trees that changed are written to one or more files of that round.
- The tree of a client is the one in the newest file that contains the client.
- A file is removed when every tree in it has a newer version that all remaining checkpoints use.
- When memory holds more than `memory_bytes`, trees that are also on disk are dropped, least recently used first.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open

from shoal import tree
from shoal.codec import pack
from shoal.errors import UserError, quote_reason, shorten
from shoal.store.atomic_files import make_folder, sync_folder, write_bytes
from shoal.types import ClientId, Tree

MEMORY_BYTES = 2**29
_NAME = re.compile(r"[0-9]{6,9}(-[0-9]{4,9})?")  # of a file: its round, and its part if it has one


class PrivateStore(MutableMapping[ClientId, Tree]):
    """The private trees of all clients, in memory and in the files of a folder.

    Parameters
    ----------
    folder : Path
        Folder of the files.
    memory_bytes : int
        Bytes of trees that stay in memory.
    """

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self.folder, self.memory_bytes = folder, memory_bytes
        self._device: torch.device | str = "cpu"
        self._memory: OrderedDict[ClientId, Tree] = OrderedDict()
        self._memory_used_bytes = 0
        self._changed: set[ClientId] = set()  # in memory only
        self._changed_bytes = 0
        self._unnamed_parts: list[list[ClientId]] = []  # changed, and already in temporary files
        self._part_of_client: dict[ClientId, int] = {}
        self._file_of_client: dict[ClientId, str] = {}  # a file is named by its round, and by its part if it has one
        self._num_current_trees: dict[str, int] = {}  # file -> trees in it that have no newer version
        self._replaced_in_round: dict[str, int] = {}  # file -> the round in which its last tree was replaced
        self._open_file: _PrivateFile | None = None  # the file read last

    def __getitem__(self, client: ClientId) -> Tree:
        if client not in self._memory:
            part = self._part_of_client.get(client)
            path = self._path(self._file_of_client[client]) if part is None else self._part_path(part)
            self._keep_in_memory(client, self._read(client, path))
            self._evict()
        self._memory.move_to_end(client)
        return self._memory[client]

    def __setitem__(self, client: ClientId, private: Tree) -> None:
        if client in self._changed:
            self._changed_bytes -= tree.size_bytes(self._memory[client])
        self._keep_in_memory(client, private)
        self._changed.add(client)
        self._changed_bytes += tree.size_bytes(private)
        self._part_of_client.pop(client, None)
        if self._changed_bytes > self.memory_bytes // 4:
            self._write_part()

    def __delitem__(self, client: ClientId) -> None:
        raise TypeError("The private tree of a client can be replaced, but not deleted.")

    def __iter__(self) -> Iterator[ClientId]:
        return iter(sorted(self._file_of_client.keys() | self._changed | self._part_of_client.keys()))

    def __len__(self) -> int:
        return len(self._file_of_client.keys() | self._changed | self._part_of_client.keys())

    def __contains__(self, client: object) -> bool:
        return client in self._file_of_client or client in self._changed or client in self._part_of_client

    @property
    def files(self) -> list[str]:
        """The files that contain the current tree of at least one client."""
        return sorted(self._num_current_trees)

    def save(self, round_index: int) -> None:
        """Writes the trees that changed since the last save, and drops from memory what exceeds the limit.

        When this returns, the trees are on the disk.
        """
        for part, clients in enumerate(self._unnamed_parts):
            name = f"{round_index:06d}-{part:04d}"
            os.rename(self._part_path(part), self._path(name))
            for client in clients:
                self._assign_to_file(client, name)
        if self._unnamed_parts:
            sync_folder(self.folder)
        if self._changed:
            name = f"{round_index:06d}"
            self._write(self._path(name))
            for client in self._changed:
                self._assign_to_file(client, name)
        self._unnamed_parts, self._part_of_client, self._open_file = [], {}, None
        self._changed.clear()
        self._changed_bytes = 0
        self._evict()

    def _write_part(self) -> None:
        part = len(self._unnamed_parts)
        self._write(self._part_path(part))
        self._unnamed_parts.append(sorted(self._changed))
        self._part_of_client |= dict.fromkeys(self._changed, part)
        self._changed.clear()
        self._changed_bytes = 0
        self._evict()

    def _write(self, path: Path) -> None:
        make_folder(self.folder)
        write_bytes(path, pack({c: self._memory[c] for c in sorted(self._changed)}))

    def _evict(self) -> None:
        """Drops trees from memory down to the limit. Trees that are not on disk stay."""
        for client in list(self._memory) if self._memory_used_bytes > self.memory_bytes else ():
            if client not in self._changed:
                self._memory_used_bytes -= tree.size_bytes(self._memory.pop(client))
            if self._memory_used_bytes <= self.memory_bytes // 2:  # else the next tree would search again
                return

    def discard_before(self, oldest: int) -> None:
        """Removes the files that no checkpoint from round `oldest` on needs."""
        for name in [n for n, replaced in self._replaced_in_round.items() if replaced <= oldest]:
            self._path(name).unlink(missing_ok=True)
            del self._replaced_in_round[name]

    def discard_unnamed_parts(self) -> None:
        """Removes the temporary files of an unfinished round, which may fill the disk."""
        for leftover in self.folder.glob(".part-*.tmp"):
            with suppress(OSError):
                leftover.unlink()

    def check(self, names: list[str]) -> None:
        """Raises a UserError if one of these files is missing, damaged or cut short."""
        for name in names:
            if not _NAME.fullmatch(name):
                raise UserError(f"{shorten(name)!r} is not the name of a file of private state.")
            path = self._path(name)
            if not path.exists():
                raise UserError(f"{path.name} of the clients' private state is missing")
            header, header_bytes = _read_header(path)
            if path.stat().st_size != 8 + header_bytes + max((end for _, end in header.values()), default=0):
                raise UserError(f"{path.name} of the clients' private state is cut short")

    def restore(self, round_index: int, device: torch.device | str = "cpu") -> None:
        """Returns to the state after this round. Files of later rounds go, because those rounds will run again."""
        self.__init__(self.folder, self.memory_bytes)  # type: ignore[misc]
        self._device = device
        self.discard_unnamed_parts()
        for path in sorted(self.folder.glob("round-*.safetensors")):  # parts of a round come before its last file
            name = path.stem.removeprefix("round-")
            if not _NAME.fullmatch(name):
                continue
            if _round_of(name) > round_index:
                path.unlink()
                continue
            for client in {unquote(leaf.split("/")[0]) for leaf in _read_header(path)[0]}:
                self._assign_to_file(client, name)

    def _assign_to_file(self, client: ClientId, name: str) -> None:
        old = self._file_of_client.get(client)
        self._file_of_client[client] = name
        self._num_current_trees[name] = self._num_current_trees.get(name, 0) + 1
        if old is not None:
            self._num_current_trees[old] -= 1
            if self._num_current_trees[old] == 0:
                del self._num_current_trees[old]
                self._replaced_in_round[old] = _round_of(name)

    def _keep_in_memory(self, client: ClientId, private: Tree) -> None:
        if client in self._memory:
            self._memory_used_bytes -= tree.size_bytes(self._memory[client])
        self._memory[client] = private
        self._memory.move_to_end(client)
        self._memory_used_bytes += tree.size_bytes(private)

    def _path(self, name: str) -> Path:
        return self.folder / f"round-{name}.safetensors"

    def _part_path(self, part: int) -> Path:
        return self.folder / f".part-{part:04d}.tmp"  # `restore` removes such files of a killed run

    def _read(self, client: ClientId, path: Path) -> Tree:
        if self._open_file is None or self._open_file.path != path:
            self._open_file = _PrivateFile(path, str(self._device))
        return self._open_file.read_tree(client)


class _PrivateFile:
    """A file that stays open for many reads, because clients of one round often have their trees in one file."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device=device)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {quote_reason(error)}.") from None
        self._names = self._by_client()

    def _by_client(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in self._file.keys():  # noqa: SIM118
            names.setdefault(name.split("/")[0], []).append(name)
        return names

    def read_tree(self, client: ClientId) -> Tree:
        key = quote(client, safe="*")
        names = sorted(self._names.get(key, []))
        try:
            flat = {name.removeprefix(key + "/"): self._file.get_tensor(name).clone() for name in names}
            return tree.unflatten(flat)
        except (SafetensorError, UserError, KeyError) as error:  # KeyError: a type that PyTorch does not have
            raise UserError(f"{self.path} is damaged: {quote_reason(error)}.") from None


def _round_of(name: str) -> int:
    return int(name.split("-")[0])


def _read_header(path: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """Returns where each tensor begins and ends, and the bytes of the header. The header may be damaged."""
    with path.open("rb") as f:
        header_bytes, file_bytes = int.from_bytes(f.read(8), "little"), path.stat().st_size
        if header_bytes > file_bytes - 8:  # reading would allocate what the header claims
            raise UserError(f"{path} is damaged: its header has {header_bytes} bytes, but the file has {file_bytes}.")
        text = f.read(header_bytes)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        spans = {name: (int(x["data_offsets"][0]), int(x["data_offsets"][1])) for name, x in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is damaged: its header has no list of tensors ({quote_reason(error)}).") from None
    return spans, header_bytes
