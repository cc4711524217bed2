"""Random numbers that all follow from one seed, without global state and without state in checkpoints.

- The server, and the order of a client's samples, use `generator(derive_seed(...))`, where names and numbers separate
  the streams.
- A client's training step, in which many clients may be stacked, uses `uniform(key, shape)`. It is a stateless hash of
  key and position, and gives the same numbers for one client, for stacked clients, and on another machine.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def derive_seed(*parts: object) -> int:
    """Returns a seed of 48 bits from any printable parts, as in `derive_seed(seed, round, "train", client)`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def generator(seed: int) -> torch.Generator:
    """Returns a torch generator with this seed."""
    return torch.Generator().manual_seed(seed)


def _mix(x: Tensor) -> Tensor:
    """Applies a bijection of 32 bits in which every bit depends on all others (xor-shift and odd multipliers)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(key: Tensor, shape: tuple[int, ...], stream: int = 0) -> Tensor:
    """Returns uniform random numbers in [0, 1).

    Parameters
    ----------
    key
        An int64 scalar that determines the numbers together with `stream`.
    shape
        The shape of the result.
    stream
        Separates different uses of one key within a step.
    """
    count = 1
    for n in shape:
        count *= n
    position = torch.arange(count, device=key.device)
    start = _mix(_mix(key & _MASK) ^ ((key >> 32) & _MASK) ^ _mix(torch.as_tensor(stream + 1, device=key.device)))
    return (_mix((position + start) & _MASK).to(torch.float32) * (1 / 4294967808)).reshape(shape)
