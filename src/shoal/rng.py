"""All chance follows from one seed, by name: nothing to save at a checkpoint, no global state.

Two kinds. On the server and for the order of a client's rows: `generator(derive_seed(...))`. Inside a
client's step, where many clients may be stacked on one axis: `uniform(key, shape)`, a stateless hash of
(key, position) that gives the same numbers one by one, stacked, or on another machine.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def derive_seed(*parts: object) -> int:
    """A seed of 48 bits from any printable parts: derive_seed(seed, round, "train", client)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every bit depends on every other (xor-shift and odd multipliers)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(key: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """Numbers in [0, 1), fixed by `key` (an int64 scalar) and `stream` (one per use within a step)."""
    count = 1
    for n in shape:
        count *= n
    position = torch.arange(count, device=key.device)
    start = _mix(_mix(key & _MASK) ^ ((key >> 32) & _MASK) ^ _mix(torch.as_tensor(stream + 1, device=key.device)))
    return (_mix((position + start) & _MASK).to(torch.float32) * (1 / 4294967808)).reshape(shape)
