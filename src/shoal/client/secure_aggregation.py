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

KEY, KEYS, SUM, UNRESPONSIVE = "key", "keys", "sum", "silent"
OWN_MASK = "own mask"  # in a client's private tree: what this round's mask of its own is drawn from
SEED_BYTES = 32
FIXED_POINT_ONE = 2**24  # in whole numbers, so that sums are exact: a parameter's last bit is 2^-24
MAX_FIXED_POINT = 2**52  # of a client's whole numbers: a thousand of them fit into 64 bits
NUM_TRAILING_VALUES = 4  # numbers that follow the model's: its weight, loss and rows, and whether training diverged
FixedPoint = NDArray[np.int64]


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    return bytes(data.to(torch.uint8).tolist())


@dataclass(frozen=True)
class SendPublicKey:
    """A client makes a pair of keys, keeps one and tells the other, and whether it has rows. Keys and own masks are the
    one thing that does not follow from the run's seed: the server knows that."""

    name: str = KEYS
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private.get(KEY, as_tensor(secrets.token_bytes(SEED_BYTES)))}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        public = X25519PrivateKey.from_private_bytes(as_bytes(state[KEY])).public_key().public_bytes_raw()
        held = {"train": int(counts["train"] > 0)}
        return Report({KEY: {"public": as_tensor(public)}}, {}, held), {KEY: state[KEY]}


def secure_sum_name(round_index: int, public_keys: Iterable[bytes]) -> bytes:
    """By round and members: a round that is played again with others has other masks."""
    return f"shoal sum {round_index} ".encode() + sha256(b"".join(sorted(public_keys))).digest()


def pair_seed(private_key: bytes, other_public_key: bytes, sum_name: bytes) -> bytes:
    """What two clients draw their masks of one sum from; it says nothing about those of another."""
    shared = X25519PrivateKey.from_private_bytes(private_key).exchange(
        X25519PublicKey.from_public_bytes(other_public_key)
    )
    return HKDF(hashes.SHA256(), SEED_BYTES, salt=None, info=sum_name).derive(shared)


def draw_mask(seed: bytes, length: int) -> FixedPoint:
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<i8").astype(np.int64)


def to_fixed_point(values: Tensor) -> FixedPoint:
    """Fixed point."""
    return (values * FIXED_POINT_ONE).round().to(torch.int64).numpy()


def flatten_model(model: Params) -> Tensor:
    return torch.cat([model[k].detach().reshape(-1).double().cpu() for k in sorted(model)])


@dataclass(frozen=True)
class TrainAndMaskUpdate:
    """Trains as `training` does. Rows times the model, the rows and the loss are sent under masks towards everybody
    whose key came with the task; who has no rows sends zeros, for its masks would be missed. Whose training diverged
    says just that."""

    training: LocalTraining
    is_weighted_by_samples: bool = True
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
        weight = float(rows) if self.is_weighted_by_samples else float(rows > 0)
        numbers = torch.cat(
            [flatten_model(report.tensors["model"]) * weight, torch.tensor([weight, loss, seen, 0.0]).double()]
        )
        if not bool((numbers.abs() * FIXED_POINT_ONE < MAX_FIXED_POINT).all()):
            numbers = torch.zeros_like(numbers)
            numbers[-1] = 1
        own_mask_seed = secrets.token_bytes(SEED_BYTES)
        masked = (
            to_fixed_point(numbers)
            + self._sum_of_pair_masks(task, as_bytes(state[KEY]), len(numbers))
            + draw_mask(own_mask_seed, len(numbers))
        )
        report = Report({SUM: {"covered": torch.from_numpy(masked)}}, {}, {"train": int(rows > 0)})
        return report, {OWN_MASK: as_tensor(own_mask_seed)}

    def _sum_of_pair_masks(self, task: Task, private_key: bytes, length: int) -> FixedPoint:
        mine = X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
        keys = [as_bytes(k) for k in task.models[KEYS].values()]
        name, total = secure_sum_name(int(task.config["round"]), keys), np.zeros(length, dtype=np.int64)
        for other in keys:
            if other != mine:
                sign = 1 if mine < other else -1
                total += sign * draw_mask(pair_seed(private_key, other, name), length)
        return total


@dataclass(frozen=True)
class RevealMasks:
    """Whose report is in a sum tells what its own mask is drawn from, once, and the masks that it shares with those who
    did not answer, so that these can be taken away. Masks of other sums stay secret."""

    name: str = "unmask"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private[KEY], OWN_MASK: private[OWN_MASK]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        key, keys = as_bytes(state[KEY]), task.models[KEYS]
        name = secure_sum_name(int(task.config["round"]), [as_bytes(k) for k in keys.values()])
        silent = task.models.get(UNRESPONSIVE, {})
        found = {c: as_tensor(pair_seed(key, as_bytes(k), name)) for c, k in silent.items()}
        return Report({"own": {"seed": state[OWN_MASK]}, "seeds": found}), {OWN_MASK: torch.zeros_like(state[OWN_MASK])}
