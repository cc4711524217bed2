"""The devices of clients: their speed, power and memory.

Speeds are sustained speeds of training small networks, far below the peak of the hardware. They are orders of
magnitude: for a result that depends on them, measure your own hardware and write a profile of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import UserError, did_you_mean, look_up, parse_toml
from shoal.rng import derive_seed
from shoal.types import ClientId

_GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """A kind of device."""

    name: str
    flops_per_s: float  # sustained, not peak
    active_w: float  # while the device computes
    idle_w: float  # while the device waits
    memory_bytes: int
    source: str


PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(
            name="microcontroller",
            flops_per_s=5e7,
            active_w=0.4,
            idle_w=0.1,
            memory_bytes=2**20,
            source="STM32H743 (Cortex-M7, 480 MHz, 1 MB: ST, DS12110); speed and watts: orders of magnitude, a "
            "twentieth of the 0.96 GFLOP/s of its floating-point unit, and about 0.1 A at 3.3 V",
        ),
        Profile(
            name="pi",
            flops_per_s=2e9,
            active_w=5.0,
            idle_w=2.5,
            memory_bytes=4 * _GIB,
            source="Raspberry Pi 4 with 4 GB; watts: 2.7 idle and 6.4 with four busy cores (Geerling, Raspberry Pi "
            "Dramble, 2019), 2.3 and 5.3 (Chipwired, 36 measurements); speed: assumed, between 0.8 GFLOP/s of Linpack "
            "in NumPy as it comes (sci-pi.org.uk) and the order of 10 GFLOP/s of a tuned one",
        ),
        Profile(
            name="phone",
            flops_per_s=5e9,
            active_w=3.0,
            idle_w=0.5,
            memory_bytes=6 * _GIB,
            source="a phone of the middle class: orders of magnitude; a few watts are what it can give off for long "
            "(on the limit: Bhat et al., Power and thermal analysis of commercial mobile platforms, 2019)",
        ),
        Profile(
            name="jetson",
            flops_per_s=5e10,
            active_w=10.0,
            idle_w=4.0,
            memory_bytes=8 * _GIB,
            source="Jetson Orin Nano 8 GB (NVIDIA, data sheet: modes of 7 and 15 W); idle: order of magnitude, a board "
            "stripped to the least draws 2.6 W (NVIDIA's developer forum, 2025); speed: order of magnitude, a "
            "twenty-fifth of the 1.28 TFLOP/s of 1024 cores at 625 MHz",
        ),
        Profile(
            name="server",
            flops_per_s=1e11,
            active_w=65.0,
            idle_w=20.0,
            memory_bytes=32 * _GIB,
            source="one processor of the 65 W class, no GPU: orders of magnitude",
        ),
    )
}


def assign_profiles(spec: str, clients: Sequence[ClientId], seed: int) -> dict[ClientId, Profile]:
    """Returns a profile for every client.

    The draw of a client depends on its name and the seed alone, so that the client keeps its profile when other clients
    join or leave.

    Parameters
    ----------
    spec : str
        A profile such as `pi`, or a mix with shares such as `pi:0.5,phone:0.3,boards.toml#mine:0.2`.
    clients : Sequence[ClientId]
        The clients.
    seed : int
        Seed of the draws.

    Returns
    -------
    dict[ClientId, Profile]
        The profile of each client.

    Raises
    ------
    UserError
        If a profile is unknown or a share is not above 0.
    """
    parts = [_parse_part(spec, text.strip()) for text in spec.split(",")]
    if not math.isfinite(sum(share for _, share in parts)):
        raise UserError(f"devices {spec!r}: the sum of the shares is too large. Use smaller shares, as in pi:0.5.")
    bounds = np.cumsum([share for _, share in parts])
    draws = np.array([derive_seed(seed, "device", client) for client in clients]) / 2**48  # seeds are uniform
    chosen = np.searchsorted(bounds, draws * bounds[-1], side="right").tolist()
    return {client: parts[i][0] for client, i in zip(clients, chosen, strict=True)}


def _parse_part(spec: str, text: str) -> tuple[Profile, float]:
    name, colon, amount = text.partition(":")
    try:
        share = float(amount) if colon else 1.0
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share > 0):
        raise UserError(f"devices {spec!r}: the share {amount!r} of {name} is not a number above 0, as in pi:0.5.")
    return find_profile(name), share


def find_profile(name: str) -> Profile:
    """Returns the profile of a name, or of `file.toml#name`, a table in a file of the user."""
    path, mark, table = name.partition("#")
    if mark or path.endswith(".toml"):
        return _read_profile(Path(path), table)
    return look_up("device", name, PROFILES, own_format="file.toml#name")


def _read_profile(path: Path, name: str) -> Profile:
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"device file {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"device file {path} is not TOML: {error}.") from error
    table_names = ", ".join(tables) or "no tables"
    if not name:
        raise UserError(f"device file {path} is named without a table, as in {path}#NAME. It has {table_names}.")
    table = tables.get(name)
    if not isinstance(table, dict):
        raise UserError(f"device file {path} has no table [{name}]. It has {table_names}.")
    return _check_profile(f"device file {path}, [{name}]", f"{path}#{name}", {"source": path.name, **table})


def _check_profile(where: str, name: str, table: Mapping[str, Any]) -> Profile:
    keys = {field.name for field in fields(Profile)} - {"name"}
    if unknown := sorted(set(table) - keys):
        raise UserError(f"{where}: {unknown[0]} is not known{did_you_mean(unknown[0], keys)}")
    if missing := sorted(keys - set(table)):
        raise UserError(f"{where} has no {', '.join(missing)}.")
    for key in sorted(keys - {"source"}):
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise UserError(f"{where}: {key} is {value!r}; it must be a number above 0.")
    return Profile(name=name, **table)
