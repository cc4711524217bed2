"""The links between the server and a client: the seconds and joules of a message.

joules = (radiated power + radio_w) * seconds. Pereira et al., Sec. IV-B, count the radiated power only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from shoal.cost.wifi import Wifi
from shoal.errors import UserError, look_up


class Channel(Protocol):
    """One direction of a link."""

    def airtime_s(self, bits: int) -> float:
        """Returns the seconds that a message of this size takes."""


@dataclass(frozen=True)
class FixedRate:
    """A channel with the same number of bits per second for every size of message."""

    bits_per_s: float

    def airtime_s(self, bits: int) -> float:
        return bits / self.bits_per_s


class Transfer(NamedTuple):
    """The cost of a message."""

    seconds: float
    joules: float


@dataclass(frozen=True)
class Link:
    """A link between the server and a client, or between an edge and the cloud."""

    name: str
    down_channel: Channel
    up_channel: Channel
    radiated_down_w: float  # power that the sender radiates
    radiated_up_w: float
    radio_w: float  # power of the client's electronics while a message is sent
    source: str

    def download(self, size_bytes: int) -> Transfer:
        """Returns the cost of a message to the client."""
        return self._transfer(self.down_channel, self.radiated_down_w, size_bytes)

    def upload(self, size_bytes: int) -> Transfer:
        """Returns the cost of a message from the client."""
        return self._transfer(self.up_channel, self.radiated_up_w, size_bytes)

    def _transfer(self, channel: Channel, radiated_w: float, size_bytes: int) -> Transfer:
        seconds = channel.airtime_s(8 * size_bytes)
        return Transfer(seconds, (radiated_w + self.radio_w) * seconds)


def dbm_to_watts(dbm: float) -> float:
    """Converts decibel-milliwatts to watts."""
    return float(10 ** (dbm / 10) / 1000)


def _wifi(name: str, mcs: int) -> Link:
    channel = Wifi(mcs)
    return Link(
        name,
        down_channel=channel,
        up_channel=channel,
        radiated_down_w=dbm_to_watts(20),
        radiated_up_w=dbm_to_watts(9),
        radio_w=0.0,
        source="IEEE 802.11ax, 20 MHz, one stream; 20 dBm down, 9 dBm up, no electronics: Pereira et al., Sec. IV-B",
    )


LINKS: dict[str, Link] = {
    "wifi": _wifi("wifi", mcs=7),
    "wifi-slow": _wifi("wifi-slow", mcs=0),
    "lte-m": Link(
        "lte-m",
        down_channel=FixedRate(300e3),
        up_channel=FixedRate(375e3),
        radiated_down_w=0.0,
        radiated_up_w=dbm_to_watts(23),
        radio_w=0.5,
        source="300 kb/s down, 375 kb/s up: 3GPP Release 13, category M1, half duplex; 23 dBm up: 3GPP TS 36.101, "
        "power class 3; the base station is not counted; electronics: order of magnitude (amplifier losses, baseband)",
    ),
    "ethernet": Link(
        "ethernet",
        down_channel=FixedRate(100e6),
        up_channel=FixedRate(100e6),
        radiated_down_w=0.0,
        radiated_up_w=0.0,
        radio_w=0.3,
        source="100 Mb/s: IEEE 802.3, headers (about 5 %) not counted; 0.11 to over 0.3 W for a 10/100 transceiver: "
        "Texas Instruments, SSZTAM3, 2016",
    ),
}


def find_link(name: str, radio_w: float | None = None) -> Link:
    """Returns the link of a name. `radio_w` replaces the power of the link's electronics."""
    link = look_up("link", name, LINKS)
    if radio_w is None:
        return link
    if not (math.isfinite(radio_w) and radio_w >= 0):
        raise UserError(f"radio_w is {radio_w}; it must be a number of watts, 0 or more.")
    return replace(link, radio_w=radio_w)
