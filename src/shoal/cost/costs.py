"""Converts bytes and operations to seconds and joules, with a device and a link for every client.

It also has the limits of a run. The devices are in `devices.py`, the links in `links.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.cost.devices import PROFILES, Profile
from shoal.cost.links import LINKS, Link
from shoal.types import CENTRALISED_CLIENT, ClientId


@dataclass(frozen=True)
class CostModel:
    """The devices and links of a run, and its limits on joules and seconds."""

    profiles: Mapping[ClientId, Profile] = field(default_factory=dict)
    default_profile: Profile = PROFILES["pi"]  # of clients that `profiles` does not have
    server: Profile = PROFILES["server"]
    link: Link = LINKS["wifi"]
    cloud_link: Link | None = None  # between edges and the cloud; None without edges
    count_idle: bool = False  # whether clients are charged for waiting for the slowest one
    battery_joules: float | None = None  # of each client; a client with an empty battery takes no further part
    budget_joules: float | None = None  # of all clients together; the run ends when they are spent
    deadline_s: float | None = None  # of a stage; later reports are not used

    def profile(self, client: ClientId) -> Profile:
        """Returns the device of a client."""
        return self.server if client == CENTRALISED_CLIENT else self.profiles.get(client, self.default_profile)

    def facts(self) -> dict[str, Any]:
        """Returns the content of devices.json: each client's device, and all numbers behind the seconds and joules."""
        return {
            "clients": {client: profile.name for client, profile in self.profiles.items()},
            "devices": {profile.name: _describe(profile) for profile in self.profiles.values()},
            "server": _describe(self.server),
            "link": _describe(self.link),
            **({} if self.cloud_link is None else {"cloud_link": _describe(self.cloud_link)}),
        }

    def compute_cost(self, client: ClientId, flops: int) -> tuple[float, float]:
        """Returns the seconds and the joules of computing."""
        profile = self.profile(client)
        seconds = flops / profile.flops_per_s
        return seconds, seconds * profile.active_w

    def radio_cost(self, bytes_down: int, bytes_up: int) -> tuple[float, float]:
        """Returns the seconds and the joules of a client's download and upload, one after the other."""
        return _radio_cost(self.link, bytes_down, bytes_up)

    def edge_cloud_cost(self, bytes_down: int, bytes_up: int) -> tuple[float, float]:
        """Returns the seconds and the joules of an exchange between an edge and the cloud."""
        return _radio_cost(self.cloud_link or LINKS["ethernet"], bytes_down, bytes_up)

    def duration_s(self, seconds: NDArray[np.float64]) -> float:
        """Returns the duration of a stage, which lasts as long as its slowest client, or until the deadline."""
        slowest = float(seconds.max(initial=0.0))
        return slowest if self.deadline_s is None else min(slowest, self.deadline_s)

    def idle_joules(self, clients: Sequence[ClientId], waiting_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the joules of waiting for each client: zeros unless `count_idle`."""
        if not self.count_idle:
            return np.zeros(len(clients))
        return waiting_s * np.array([self.profile(c).idle_w for c in clients])


def _describe(device_or_link: Profile | Link) -> dict[str, Any]:
    return {k: v for k, v in asdict(device_or_link).items() if k not in ("name", "source")}


@lru_cache(maxsize=4096)  # nearly all messages of a stage have the same size
def _radio_cost(link: Link, bytes_down: int, bytes_up: int) -> tuple[float, float]:
    (down_s, down_joules), (up_s, up_joules) = link.download(bytes_down), link.upload(bytes_up)
    return down_s + up_s, down_joules + up_joules
