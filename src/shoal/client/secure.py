"""Reports of which the server can read only the sum: what a client sends is covered by masks that cancel in it.

Every two clients of a sum agree on a secret (X25519) that the server, which passes their public keys on, cannot know.
From it both draw the same numbers for this round (HKDF, ChaCha20); one adds them, the other takes them away.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

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

KEY, KEYS, SUM = "key", "keys", "sum"
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
    """A client makes a pair of keys, keeps one and tells the other. They are the one thing that does not follow from
    the run's seed: the server knows that."""

    name: str = KEYS
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private.get(KEY, as_tensor(secrets.token_bytes(BYTES)))}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        public = X25519PrivateKey.from_private_bytes(as_bytes(s[KEY])).public_key().public_bytes_raw()
        return Report({KEY: {"public": as_tensor(public)}}), {KEY: s[KEY]}


def pair_seed(key: bytes, other: bytes, round: int) -> bytes:
    """What two clients draw their masks of one round from; it says nothing about those of another."""
    shared = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(hashes.SHA256(), BYTES, salt=None, info=f"shoal sum {round}".encode()).derive(shared)


def mask(seed: bytes, numbers: int) -> Whole:
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * numbers)), dtype="<i8").astype(np.int64)


def whole(values: Tensor) -> Whole:
    """Fixed point."""
    return (values * ONE).round().to(torch.int64).numpy()


def flat(model: Params) -> Tensor:
    return torch.cat([model[k].detach().reshape(-1).double().cpu() for k in sorted(model)])


def unflat(values: Tensor, like: Params) -> Params:
    names = sorted(like)
    parts = torch.split(values, [like[k].numel() for k in names])
    return {k: part.view(like[k].shape).to(like[k]) for k, part in zip(names, parts, strict=True)}


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

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training.end(task, s, counts)
        rows, (loss, seen) = report.counts["train"], report.metrics["loss"]
        weight = float(rows) if self.by_size else float(rows > 0)
        numbers = torch.cat([flat(report.tensors["model"]) * weight, torch.tensor([weight, loss, seen, 0.0]).double()])
        if not bool((numbers.abs() * ONE < LARGEST).all()):
            numbers = torch.zeros_like(numbers)
            numbers[-1] = 1
        covered = whole(numbers) + self._masks(task, as_bytes(s[KEY]), len(numbers))
        return Report({SUM: {"covered": torch.from_numpy(covered)}}, {}, {"train": int(rows > 0)}), None

    def _masks(self, task: Task, key: bytes, numbers: int) -> Whole:
        mine = X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
        others = [as_bytes(k) for k in task.models[KEYS].values()]
        round, total = int(task.config["round"]), np.zeros(numbers, dtype=np.int64)
        for other in others:
            if other != mine:
                sign = 1 if mine < other else -1
                total += sign * mask(pair_seed(key, other, round), numbers)
        return total


@dataclass(frozen=True)
class RevealMasks:
    """Who is left of a sum tells what it drew this round's masks from that it shares with those who did not answer, so
    that these can be taken away. Masks of other rounds stay secret."""

    name: str = "unmask"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private[KEY]}

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        key, round = as_bytes(s[KEY]), int(task.config["round"])
        found = {c: as_tensor(pair_seed(key, as_bytes(k), round)) for c, k in task.models[KEYS].items()}
        return Report({"seeds": found}), None
