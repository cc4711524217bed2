"""Reports of which the server can read only the sum: what a client sends is covered by masks that cancel in it.

Every two clients of a sum agree on a secret (X25519) that the server, which passes their public keys on, cannot know.
From it both draw the same numbers for this sum (HKDF, ChaCha20); one adds them, the other takes them away. Each adds a
mask of its own, too, which it reveals only when it is asked as one whose report arrived in time: so what came too late
stays covered, although others then reveal what they shared with its sender.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from shoal.client.train import LocalTraining
from shoal.types import Params, Phase, Report, Task, Tree

KEY, KEYS, SUM, SILENT = "key", "keys", "sum", "silent"
OWN = "own mask"  # in a client's private tree: what this round's mask of its own is drawn from
BYTES = 32
ONE = 2**24  # in whole numbers, so that sums are exact: a parameter's last bit is 2^-24
LARGEST = 2**52  # of a client's whole numbers: a thousand of them fit into 64 bits
TAIL = 4  # numbers that follow the model's: its weight, loss and rows, and whether training diverged
Whole = NDArray[np.int64]


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    return bytes(data.to(torch.uint8).tolist())


@dataclass(frozen=True)
class TellKey:
    """A client makes a pair of keys, keeps one and tells the other, and whether it has rows. Keys and own masks are the
    one thing that does not follow from the run's seed: the server knows that."""

    name: str = KEYS
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private.get(KEY, as_tensor(secrets.token_bytes(BYTES)))}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        public = X25519PrivateKey.from_private_bytes(as_bytes(state[KEY])).public_key().public_bytes_raw()
        held = {"train": int(counts["train"] > 0)}
        return Report({KEY: {"public": as_tensor(public)}}, {}, held), {KEY: state[KEY]}


def name_of_sum(round: int, keys: Iterable[bytes]) -> bytes:
    """By round and members: a round that is played again with others has other masks."""
    return f"shoal sum {round} ".encode() + sha256(b"".join(sorted(keys))).digest()


def pair_seed(key: bytes, other: bytes, name: bytes) -> bytes:
    """What two clients draw their masks of one sum from; it says nothing about those of another."""
    shared = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(hashes.SHA256(), BYTES, salt=None, info=name).derive(shared)


def mask(seed: bytes, numbers: int) -> Whole:
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * numbers)), dtype="<i8").astype(np.int64)


def whole(values: Tensor) -> Whole:
    """Fixed point."""
    return (values * ONE).round().to(torch.int64).numpy()


def flat(model: Params) -> Tensor:
    return torch.cat([model[k].detach().reshape(-1).double().cpu() for k in sorted(model)])


@dataclass(frozen=True)
class SumTraining:
    """Trains as `training` does. Rows times the model, the rows and the loss are sent under masks towards everybody
    whose key came with the task; who has no rows sends zeros, for its masks would be missed. Whose training diverged
    says just that."""

    training: LocalTraining
    by_size: bool = True
    name: str = "train"

    @property
    def batchable(self) -> bool:
        return self.training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.training.phases

    def begin(self, task: Task, private: Tree) -> Tree:
        model = {k: m for k, m in task.models.items() if k != KEYS}
        return self.training.begin(replace(task, models=model), private) | {KEY: private[KEY]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training.end(task, state, counts)
        rows, (loss, seen) = report.counts["train"], report.metrics["loss"]
        weight = float(rows) if self.by_size else float(rows > 0)
        numbers = torch.cat([flat(report.tensors["model"]) * weight, torch.tensor([weight, loss, seen, 0.0]).double()])
        if not bool((numbers.abs() * ONE < LARGEST).all()):
            numbers = torch.zeros_like(numbers)
            numbers[-1] = 1
        own = secrets.token_bytes(BYTES)
        covered = whole(numbers) + self._masks(task, as_bytes(state[KEY]), len(numbers)) + mask(own, len(numbers))
        report = Report({SUM: {"covered": torch.from_numpy(covered)}}, {}, {"train": int(rows > 0)})
        return report, {OWN: as_tensor(own)}

    def _masks(self, task: Task, key: bytes, numbers: int) -> Whole:
        mine = X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
        keys = [as_bytes(k) for k in task.models[KEYS].values()]
        name, total = name_of_sum(int(task.config["round"]), keys), np.zeros(numbers, dtype=np.int64)
        for other in keys:
            if other != mine:
                sign = 1 if mine < other else -1
                total += sign * mask(pair_seed(key, other, name), numbers)
        return total


@dataclass(frozen=True)
class RevealMasks:
    """Whose report is in a sum tells what its own mask is drawn from, once, and the masks that it shares with those who
    did not answer, so that these can be taken away. Masks of other sums stay secret."""

    name: str = "unmask"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private[KEY], OWN: private[OWN]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        key, keys = as_bytes(state[KEY]), task.models[KEYS]
        name = name_of_sum(int(task.config["round"]), [as_bytes(k) for k in keys.values()])
        silent = task.models.get(SILENT, {})
        found = {c: as_tensor(pair_seed(key, as_bytes(k), name)) for c, k in silent.items()}
        return Report({"own": {"seed": state[OWN]}, "seeds": found}), {OWN: torch.zeros_like(state[OWN])}
