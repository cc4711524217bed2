"""What a message costs on its way between the server and a client: seconds, and joules.

joules = (radiated + radio_w) * seconds (Pereira et al., Sec. IV-B, has the radiated power only).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from shoal.cost.wifi import Wifi
from shoal.errors import UserError, look_up


class Channel(Protocol):
    def airtime_s(self, bits: int) -> float: ...


@dataclass(frozen=True)
class FixedRate:
    """So many bits a second, whatever the size of the message."""

    bits_per_s: float

    def airtime_s(self, bits: int) -> float:
        return bits / self.bits_per_s


class Transfer(NamedTuple):
    seconds: float
    joules: float


@dataclass(frozen=True)
class Link:
    name: str
    down_channel: Channel
    up_channel: Channel
    radiated_down_w: float  # by the sender
    radiated_up_w: float
    radio_w: float  # electronics of the client while the message is on its way
    source: str

    def download(self, size_bytes: int) -> Transfer:
        return self._transfer(self.down_channel, self.radiated_down_w, size_bytes)

    def upload(self, size_bytes: int) -> Transfer:
        return self._transfer(self.up_channel, self.radiated_up_w, size_bytes)

    def _transfer(self, channel: Channel, radiated_w: float, size_bytes: int) -> Transfer:
        seconds = channel.airtime_s(8 * size_bytes)
        return Transfer(seconds, (radiated_w + self.radio_w) * seconds)


def dbm_to_watts(dbm: float) -> float:
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
    """A link by name; `radio_w` replaces the link's own figure."""
    found = look_up("link", name, LINKS)
    if radio_w is None:
        return found
    if not (math.isfinite(radio_w) and radio_w >= 0):
        raise UserError(f"radio_w is {radio_w}; it must be a number of watts, 0 or more")
    return replace(LINKS[name], radio_w=radio_w)
