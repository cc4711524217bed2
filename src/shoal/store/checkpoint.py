"""The server's state on disk: one folder per round, which is complete or does not exist."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal import tree
from shoal.codec import pack, unpack
from shoal.errors import UserError, quote_reason
from shoal.store import FORMAT, FormatError, check_format
from shoal.store.atomic_files import json_bytes, write_folder
from shoal.types import ServerState

log = logging.getLogger(__name__)

NUM_KEPT_CHECKPOINTS = 3  # the newest, and two in case it is damaged


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, and the names of the files with the clients' private state at that time."""

    state: ServerState
    private: list[str]


class Checkpoints:
    """The checkpoints in a folder, of which the newest `num_kept` are kept."""

    def __init__(self, folder: Path, num_kept: int = NUM_KEPT_CHECKPOINTS) -> None:
        self.folder, self.num_kept = folder, num_kept

    def _path(self, round_index: int) -> Path:
        return self.folder / f"round-{round_index:06d}"

    def rounds(self) -> list[int]:
        """Returns the rounds that have a checkpoint, in ascending order."""
        names = (re.fullmatch(r"round-([0-9]{6,9})", path.name) for path in self.folder.glob("round-*"))
        return sorted(int(name[1]) for name in names if name)

    def fingerprint(self, round_index: int) -> tuple[int, ...]:
        """Returns numbers that change whenever the checkpoint is written again."""
        file_facts = (self._path(round_index) / "state.json").stat()
        return round_index, file_facts.st_ino, file_facts.st_mtime_ns

    def save(self, state: ServerState, private: list[str]) -> None:
        """Writes the checkpoint of a round, with the names of the files of private state that belong to it.

        When this returns, the checkpoint is on the disk.
        """
        tensors = pack(
            {"models": dict(state.models), "membership": dict(state.membership), "memory": dict(state.memory)}
        )
        facts = {
            "format": FORMAT,
            "private": private,
            "round": state.round,
            "sha256": hashlib.sha256(tensors).hexdigest(),
        }
        files = {"state.safetensors": tensors, "state.json": json_bytes(facts)}
        # A checkpoint of this round exists only if it is damaged, and is replaced.
        write_folder(self._path(state.round), files, self.folder / f".round-{state.round:06d}.tmp")

    def discard_old(self) -> None:
        """Removes all checkpoints but the newest `num_kept`."""
        for old in self.rounds()[: -self.num_kept]:
            shutil.rmtree(self._path(old))

    def discard_after(self, round_index: int) -> None:
        """Removes the checkpoints after this round, which are damaged. Their rounds will run again."""
        for newer in [r for r in self.rounds() if r > round_index]:
            shutil.rmtree(self._path(newer))

    def load(self, round_index: int, device: torch.device | str = "cpu") -> Checkpoint:
        """Reads the checkpoint of a round, with its models on the device.

        Raises
        ------
        OSError
            If a file of the checkpoint is missing or cannot be read.
        UserError
            If the checkpoint is damaged.
        FormatError
            If the checkpoint has the format of another version of shoal.
        """
        folder = self._path(round_index)
        facts = _read_facts(folder / "state.json")
        check_format(folder, facts)
        tensors = (folder / "state.safetensors").read_bytes()
        if hashlib.sha256(tensors).hexdigest() != facts["sha256"]:
            raise UserError(f"{folder} is damaged: its tensors do not match the checksum.")
        parts = unpack(tensors, str(folder))[0]
        models, *others = (parts.get(key, {}) for key in ("models", "membership", "memory"))
        trees = [models, *others, *(models.values() if isinstance(models, dict) else ())]
        if not all(isinstance(part, dict) for part in trees):
            raise UserError(f"{folder} is damaged: it has a tensor where a tree must be.")
        # Only models move: stages keep their memory on the CPU.
        state = ServerState(facts["round"], tree.to_device(models, device), membership=others[0], memory=others[1])
        return Checkpoint(state, facts["private"])

    def latest(self, check: Callable[[Checkpoint], None], device: torch.device | str = "cpu") -> Checkpoint | None:
        """Returns the newest undamaged checkpoint, or None. A damaged one is skipped with a warning.

        `check` must raise an OSError or ValueError if the private files of the checkpoint are damaged.

        Raises
        ------
        FormatError
            If a checkpoint has the format of another version of shoal. It is not damaged, and must not be discarded.
        """
        for round_index in reversed(self.rounds()):
            try:
                checkpoint = self.load(round_index, device)
                check(checkpoint)
                return checkpoint
            except FormatError:
                raise
            except (OSError, ValueError) as error:
                log.warning(
                    "The checkpoint of round %d is damaged (%s). The one before it is used.", round_index, error
                )
        return None


def _read_facts(path: Path) -> dict[str, Any]:
    """Returns the facts of a checkpoint, or raises a UserError if they are not of the types that `save` writes."""
    try:
        facts = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {quote_reason(error)}.") from None
    types = {"format": int, "round": int, "private": list, "sha256": str}
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), kind) for key, kind in types.items()):
        raise UserError(f"{path} is damaged: it must have a format, a round, a list of private files, and a sha256.")
    return facts | {"private": [str(name) for name in facts["private"]]}
