"""The server's state on disk: one folder a round, whole or not there."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal import tree
from shoal.codec import pack, unpack
from shoal.types import ServerState

log = logging.getLogger(__name__)

NUM_KEPT_CHECKPOINTS = 3  # checkpoints: the newest, and two to fall back on


@dataclass(frozen=True)
class Checkpoint:
    state: ServerState
    private: list[str]  # files of private state that belong to it


class Checkpoints:
    def __init__(self, folder: Path, num_kept: int = NUM_KEPT_CHECKPOINTS) -> None:
        self.folder, self.num_kept = folder, num_kept

    def _path(self, round_index: int) -> Path:
        return self.folder / f"round-{round_index:06d}"

    def rounds(self) -> list[int]:
        return sorted(int(p.name.split("-")[1]) for p in self.folder.glob("round-*"))

    def fingerprint(self, round_index: int) -> tuple[int, ...]:
        """Another one whenever the checkpoint has been written anew."""
        found = (self._path(round_index) / "state.json").stat()
        return round_index, found.st_ino, found.st_mtime_ns

    def save(self, state: ServerState, private: list[str]) -> None:
        tensors = pack(
            {"models": dict(state.models), "membership": dict(state.membership), "memory": dict(state.memory)}
        )
        facts = {
            "format": 1,
            "private": private,
            "round": state.round,
            "sha256": hashlib.sha256(tensors).hexdigest(),
        }
        temporary_folder, final_folder = self.folder / f".round-{state.round:06d}.tmp", self._path(state.round)
        shutil.rmtree(temporary_folder, ignore_errors=True)
        temporary_folder.mkdir(parents=True)
        (temporary_folder / "state.safetensors").write_bytes(tensors)
        (temporary_folder / "state.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(final_folder, ignore_errors=True)  # only a damaged one can stand there
        temporary_folder.rename(final_folder)

    def discard_old(self) -> None:
        for old in self.rounds()[: -self.num_kept]:
            shutil.rmtree(self._path(old))

    def discard_after(self, round_index: int) -> None:
        """Damaged ones that were passed over: their rounds will be played again."""
        for newer in [r for r in self.rounds() if r > round_index]:
            shutil.rmtree(self._path(newer))

    def load(self, round_index: int, device: torch.device | str = "cpu") -> Checkpoint:
        folder = self._path(round_index)
        facts = json.loads((folder / "state.json").read_text())
        tensors = (folder / "state.safetensors").read_bytes()
        if hashlib.sha256(tensors).hexdigest() != facts["sha256"]:
            raise ValueError("its tensors do not match their checksum")
        parts = unpack(tensors)[0]
        state = ServerState(
            int(facts["round"]),
            tree.to_device(
                parts.get("models", {}), device
            ),  # what stages remember stays where they made it: on the CPU
            membership=parts.get("membership", {}),
            memory=parts.get("memory", {}),
        )
        return Checkpoint(state, [str(name) for name in facts["private"]])

    def latest(self, check: Callable[[Checkpoint], None], device: torch.device | str = "cpu") -> Checkpoint | None:
        """The newest that is whole; a damaged one is passed over, and said. `check` raises if the private
        files that belong to it are not whole."""
        for round_index in reversed(self.rounds()):
            try:
                checkpoint = self.load(round_index, device)
                check(checkpoint)
                return checkpoint
            except (OSError, ValueError, KeyError) as error:
                log.warning(
                    "the checkpoint of round %d is damaged (%s); going back to the one before it", round_index, error
                )
        return None
