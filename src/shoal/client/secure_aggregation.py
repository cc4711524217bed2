"""Secure aggregation: the server can read only the sum of all reports, because masks hide each report and cancel in it.

Every two clients of a sum agree on a secret (X25519). The server forwards their public keys and cannot compute the
secret. From the secret both clients draw the same mask for this sum (HKDF, ChaCha20). One adds the mask, the other
subtracts it. Each client also adds a mask of its own, which it reveals only if its report arrived in time. A late
report therefore stays hidden, although other clients then reveal the masks that they share with its client.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from shoal.client.train import LocalTraining
from shoal.report_validation import ReportSpec, expected_report
from shoal.types import Params, Phase, Report, Task, Tree

KEY, KEYS, SUM, UNRESPONSIVE = "key", "keys", "sum", "silent"
OWN_MASK = "own mask"  # key of the private state: the seed of the client's own mask of this round
SEED_BYTES = 32
FIXED_POINT_ONE = 2**24  # fixed point makes sums exact: the last bit of a parameter is 2^-24
MAX_FIXED_POINT = 2**52  # bound of a client's fixed-point numbers: the sum of a thousand fits into 64 bits
NUM_TRAILING_VALUES = 4  # after the model's numbers: weight, loss, samples of the loss, and 1 if training diverged
FixedPoint = NDArray[np.int64]


def as_tensor(data: bytes) -> Tensor:
    """Returns bytes as a tensor, as messages need them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    """Returns the bytes of a tensor from `as_tensor`."""
    return bytes(data.to(torch.uint8).tolist())


@dataclass(frozen=True)
class SendPublicKey:
    """Creates a pair of keys, keeps the private key, and reports the public key and whether the client has samples.

    Keys and own masks do not follow from the run's seed, because the server knows the seed.
    """

    name: str = KEYS
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private.get(KEY, as_tensor(secrets.token_bytes(SEED_BYTES)))}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        public = X25519PrivateKey.from_private_bytes(as_bytes(state[KEY])).public_key().public_bytes_raw()
        sample_counts = {"train": int(counts["train"] > 0)}
        return Report({KEY: {"public": as_tensor(public)}}, {}, sample_counts), {KEY: state[KEY]}


def secure_sum_name(round_index: int, public_keys: Iterable[bytes]) -> bytes:
    """Returns the name of a sum by round and members. A round that is run again with others has other masks."""
    return f"shoal sum {round_index} ".encode() + sha256(b"".join(sorted(public_keys))).digest()


def pair_seed(private_key: bytes, other_public_key: bytes, sum_name: bytes) -> bytes:
    """Returns the seed of the mask that two clients share in one sum. It reveals nothing about their other masks."""
    shared = X25519PrivateKey.from_private_bytes(private_key).exchange(
        X25519PublicKey.from_public_bytes(other_public_key)
    )
    return HKDF(hashes.SHA256(), SEED_BYTES, salt=None, info=sum_name).derive(shared)


def draw_mask(seed: bytes, length: int) -> FixedPoint:
    """Returns the mask that follows from a seed: 64-bit random numbers."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<i8").astype(np.int64)


def to_fixed_point(values: Tensor) -> FixedPoint:
    """Returns numbers in fixed point."""
    return (values * FIXED_POINT_ONE).round().to(torch.int64).numpy()


def flatten_model(model: Params) -> Tensor:
    """Returns all numbers of a model as one vector in double precision, by sorted names."""
    return torch.cat([model[k].detach().reshape(-1).double().cpu() for k in sorted(model)])


@dataclass(frozen=True)
class TrainAndMaskUpdate:
    """Trains as `training` does and sends the weighted model, its weight and its loss under masks.

    There is a mask for every other client whose key came with the task. A client without samples sends zeros, because
    its masks are needed in the sum. If training diverged, only this fact is sent.
    """

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
        return self.training.begin(self._training_task(task), private) | {KEY: private[KEY]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        report, _ = self.training.end(task, state, counts)
        num_samples, (loss, loss_weight) = report.counts["train"], report.metrics["loss"]
        weight = float(num_samples) if self.is_weighted_by_samples else float(num_samples > 0)
        trailing = torch.tensor([weight, loss, loss_weight, 0.0]).double()
        numbers = torch.cat([flatten_model(report.tensors["model"]) * weight, trailing])
        if not bool((numbers.abs() * FIXED_POINT_ONE < MAX_FIXED_POINT).all()):
            numbers = torch.zeros_like(numbers)
            numbers[-1] = 1
        own_mask_seed = secrets.token_bytes(SEED_BYTES)
        masked = (
            to_fixed_point(numbers)
            + self._sum_of_pair_masks(task, as_bytes(state[KEY]), len(numbers))
            + draw_mask(own_mask_seed, len(numbers))
        )
        report = Report({SUM: {"covered": torch.from_numpy(masked)}}, {}, {"train": int(num_samples > 0)})
        return report, {OWN_MASK: as_tensor(own_mask_seed)}

    def report_spec(self, task: Task) -> ReportSpec | None:
        """Returns the length of the masked numbers, which follows from the model that `training` reports."""
        trained = expected_report(self.training, self._training_task(task))
        if trained is None:
            return None
        num_values = sum(prod(shape) for path, (shape, _) in trained.tensors.items() if path.startswith("model/"))
        return ReportSpec({f"{SUM}/covered": ((num_values + NUM_TRAILING_VALUES,), torch.int64)})

    def _training_task(self, task: Task) -> Task:
        """Returns the task of `training`: the models without the keys of the other clients."""
        return replace(task, models={k: m for k, m in task.models.items() if k != KEYS})

    def _sum_of_pair_masks(self, task: Task, private_key: bytes, length: int) -> FixedPoint:
        """Returns the sum of the masks shared with other clients; in each pair one client adds, one subtracts."""
        own_key = X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
        keys = [as_bytes(k) for k in task.models[KEYS].values()]
        name, total = secure_sum_name(int(task.config["round"]), keys), np.zeros(length, dtype=np.int64)
        for other in keys:
            if other != own_key:
                sign = 1 if own_key < other else -1
                total += sign * draw_mask(pair_seed(private_key, other, name), length)
        return total


@dataclass(frozen=True)
class RevealMasks:
    """Reports the seeds of masks that the server must subtract from the sum.

    A client whose report is in the sum reveals the seed of its own mask, once, and the seeds that it shares with
    clients that did not respond. Masks of other sums stay secret.
    """

    name: str = "unmask"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {KEY: private[KEY], OWN_MASK: private[OWN_MASK]}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        key, keys = as_bytes(state[KEY]), task.models[KEYS]
        name = secure_sum_name(int(task.config["round"]), [as_bytes(k) for k in keys.values()])
        unresponsive = task.models.get(UNRESPONSIVE, {})
        seeds = {c: as_tensor(pair_seed(key, as_bytes(k), name)) for c, k in unresponsive.items()}
        return Report({"own": {"seed": state[OWN_MASK]}, "seeds": seeds}), {OWN_MASK: torch.zeros_like(state[OWN_MASK])}

    def report_spec(self, task: Task) -> ReportSpec:
        """Returns one seed of the client itself and one for each client that did not respond."""
        seed = torch.empty(SEED_BYTES, dtype=torch.uint8)
        return ReportSpec.from_report(
            Report({"own": {"seed": seed}, "seeds": dict.fromkeys(task.models.get(UNRESPONSIVE, {}), seed)})
        )
