"""From bytes and operations to seconds and joules: a device and a link for every client, and the limits of a run."""

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
    profiles: Mapping[ClientId, Profile] = field(default_factory=dict)  # who is not named has the usual one
    default_profile: Profile = PROFILES["pi"]
    server: Profile = PROFILES["server"]
    link: Link = LINKS["wifi"]
    cloud_link: Link | None = None  # of edges to the cloud, where there are edges
    count_idle: bool = False  # charge those who are done for waiting until all are
    battery_joules: float | None = None  # of each client; who has used it up leaves
    budget_joules: float | None = None  # of all clients together; then the run ends
    deadline_s: float | None = None  # of a stage; who takes longer is not waited for

    def profile(self, client: ClientId) -> Profile:
        return self.server if client == CENTRALISED_CLIENT else self.profiles.get(client, self.default_profile)

    def facts(self) -> dict[str, Any]:
        """devices.json: what each client is, and all figures that seconds and joules follow from."""
        return {
            "clients": {client: profile.name for client, profile in self.profiles.items()},
            "devices": {profile.name: _describe(profile) for profile in self.profiles.values()},
            "server": _describe(self.server),
            "link": _describe(self.link),
            **({} if self.cloud_link is None else {"long_link": _describe(self.cloud_link)}),
        }

    def compute_cost(self, client: ClientId, flops: int) -> tuple[float, float]:
        """(seconds, joules)"""
        profile = self.profile(client)
        seconds = flops / profile.flops_per_s
        return seconds, seconds * profile.active_w

    def radio_cost(self, bytes_down: int, bytes_up: int) -> tuple[float, float]:
        """(seconds, joules): down and up, one after the other."""
        return _radio_cost(self.link, bytes_down, bytes_up)

    def edge_cloud_cost(self, bytes_down: int, bytes_up: int) -> tuple[float, float]:
        """(seconds, joules) of an edge that meets the cloud."""
        return _radio_cost(self.cloud_link or LINKS["ethernet"], bytes_down, bytes_up)

    def duration_s(self, seconds: NDArray[np.float64]) -> float:
        """A stage lasts as long as its slowest client, or until the deadline."""
        slowest = float(seconds.max(initial=0.0))
        return slowest if self.deadline_s is None else min(slowest, self.deadline_s)

    def idle_joules(self, clients: Sequence[ClientId], waiting_s: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self.count_idle:
            return np.zeros(len(clients))
        return waiting_s * np.array([self.profile(c).idle_w for c in clients])


def _describe(device_or_link: Profile | Link) -> dict[str, Any]:
    return {k: v for k, v in asdict(device_or_link).items() if k not in ("name", "source")}


@lru_cache(maxsize=4096)  # the messages of a stage are nearly all of one size
def _radio_cost(link: Link, bytes_down: int, bytes_up: int) -> tuple[float, float]:
    (down_s, down_joules), (up_s, up_joules) = link.download(bytes_down), link.upload(bytes_up)
    return down_s + up_s, down_joules + up_joules
