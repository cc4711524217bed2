"""The airtime of a message on IEEE 802.11ax.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods, 2025,
Sec. IV-B. The model of Δ_T is that of Wilhelmi, Bellalta et al. for 802.11ax: a message is cut into MPDUs, a PPDU
carries as many MPDUs as fit, and every PPDU is one exchange:

    RTS - SIFS - CTS - SIFS - PPDU - SIFS - block ack - DIFS - one empty slot

| symbol | meaning | here |
|---|---|---|
| Δ_T(|w|) | time on the air for a message | `Wifi.airtime_s` |
| L_RTS, L_CTS, L_BACK | bits of the control frames | `RTS_BITS`, `CTS_BITS`, `BACK_BITS` |
| L_SF, L_TAIL | service field and tail of the coder, once per frame | `SERVICE_BITS`, `TAIL_BITS` |
| L_D, L_MH, L_MD | payload, MAC header and delimiter of an MPDU | `PAYLOAD_BITS`, `HEADER_BITS`, `DELIMITER_BITS` |
| T_e | the empty slot | `SLOT_US` |

Every duration of the model is a whole number of microseconds, so that sums are exact.

Deviations from the paper
-------------------------
- The paper gives no constants. The constants here are those of the public implementations of the model (Komondor;
  Wilhelmi's MATLAB files), with the tail of a convolutional coder, 6 bits.
- The last MPDU is sent with its full size, even if it is not full.
- There are no losses, and no back-off except the empty slot, because one client sends at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import UserError

RTS_BITS, CTS_BITS, BACK_BITS = 160, 112, 240
SERVICE_BITS, TAIL_BITS = 16, 6
PAYLOAD_BITS = 12_000
HEADER_BITS = 320  # includes the checksum
DELIMITER_BITS = 32  # marks where an MPDU begins within a PPDU

SIFS_US, DIFS_US, SLOT_US = 16, 34, 9
LEGACY_PREAMBLE_US = 20
LEGACY_SYMBOL_US, LEGACY_SYMBOL_BITS = 4, 24  # of control frames: 6 Mb/s, which every station understands
HE_PREAMBLE_US = 100  # for one user
HE_SYMBOL_US = 16  # 12.8 us and a guard interval of 3.2 us
MAX_PPDU_US = 5_484
MAX_MPDUS = 64  # a block ack of 240 bits acknowledges 64 MPDUs

SUBCARRIERS = {20: 234, 40: 468, 80: 980, 160: 1960}  # channel in MHz -> sub-carriers with data


class Modulation(NamedTuple):
    """A modulation and coding scheme. The code rate is the fraction of coded bits that are data."""

    name: str
    coded_bits: int  # per sub-carrier
    code_rate_numerator: int
    code_rate_denominator: int


MODULATIONS = (  # by the standard's index, the MCS
    Modulation("BPSK 1/2", 1, 1, 2),
    Modulation("QPSK 1/2", 2, 1, 2),
    Modulation("QPSK 3/4", 2, 3, 4),
    Modulation("16-QAM 1/2", 4, 1, 2),
    Modulation("16-QAM 3/4", 4, 3, 4),
    Modulation("64-QAM 2/3", 6, 2, 3),
    Modulation("64-QAM 3/4", 6, 3, 4),
    Modulation("64-QAM 5/6", 6, 5, 6),
    Modulation("256-QAM 3/4", 8, 3, 4),
    Modulation("256-QAM 5/6", 8, 5, 6),
    Modulation("1024-QAM 3/4", 10, 3, 4),
    Modulation("1024-QAM 5/6", 10, 5, 6),
)


def control_frame_us(bits: int) -> int:
    """Returns the microseconds of a control frame."""
    return LEGACY_PREAMBLE_US + LEGACY_SYMBOL_US * _ceil_div(SERVICE_BITS + bits + TAIL_BITS, LEGACY_SYMBOL_BITS)


@dataclass(frozen=True)
class Wifi:
    """A channel of 802.11ax."""

    mcs: int = 7  # index in MODULATIONS
    channel_mhz: int = 20
    streams: int = 1
    aggregate: bool = True  # whether a PPDU carries several MPDUs

    def __post_init__(self) -> None:
        if self.mcs not in range(len(MODULATIONS)):
            raise UserError(f"mcs is {self.mcs}; it must be 0 (BPSK 1/2) to 11 (1024-QAM 5/6) for 802.11ax.")
        if self.channel_mhz not in SUBCARRIERS:
            raise UserError(f"channel_mhz is {self.channel_mhz}; it must be 20, 40, 80 or 160 for 802.11ax.")
        if self.streams not in range(1, 9):
            raise UserError(f"streams is {self.streams}; it must be 1 to 8 for 802.11ax.")

    @property
    def bits_per_symbol(self) -> int:
        """The data bits of one symbol."""
        m = MODULATIONS[self.mcs]
        coded_bits = SUBCARRIERS[self.channel_mhz] * self.streams * m.coded_bits
        return coded_bits * m.code_rate_numerator // m.code_rate_denominator

    @property
    def mpdus_per_ppdu(self) -> int:
        """The number of MPDUs that fit into the longest PPDU, at least 1."""
        if not self.aggregate:
            return 1
        symbols = (MAX_PPDU_US - HE_PREAMBLE_US) // HE_SYMBOL_US
        room_bits = symbols * self.bits_per_symbol - SERVICE_BITS - TAIL_BITS
        return min(max(room_bits // (PAYLOAD_BITS + HEADER_BITS + DELIMITER_BITS), 1), MAX_MPDUS)

    def airtime_s(self, bits: int) -> float:
        """Returns the seconds from the first RTS to the last empty slot, or 0 if there is nothing to send."""
        num_full_ppdus, last_mpdus = divmod(_ceil_div(bits, PAYLOAD_BITS), self.mpdus_per_ppdu)
        total_us = num_full_ppdus * self._exchange_us(self.mpdus_per_ppdu)
        if last_mpdus:
            total_us += self._exchange_us(last_mpdus)
        return total_us / 1e6

    def _exchange_us(self, num_mpdus: int) -> int:
        control_us = sum(control_frame_us(bits) for bits in (RTS_BITS, CTS_BITS, BACK_BITS))
        return control_us + 3 * SIFS_US + DIFS_US + SLOT_US + self._ppdu_us(num_mpdus)

    def _ppdu_us(self, num_mpdus: int) -> int:
        bits = SERVICE_BITS + num_mpdus * (PAYLOAD_BITS + HEADER_BITS + DELIMITER_BITS) + TAIL_BITS
        return HE_PREAMBLE_US + HE_SYMBOL_US * _ceil_div(bits, self.bits_per_symbol)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
