"""Airtime, links and device profiles, against numbers worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.cost.costs import CostModel
from shoal.cost.devices import PROFILES, Profile, assign_profiles, find_profile
from shoal.cost.links import LINKS, dbm_to_watts, find_link
from shoal.cost.wifi import BACK_BITS, CTS_BITS, MODULATIONS, RTS_BITS, Wifi, control_frame_us
from shoal.errors import UserError

MLP_BITS = 32 * 52_500  # 140 MPDUs of 12,000 bits
CNN_BITS = 32 * 73_418  # 2,349,376 bits: 195.8, so 196 MPDUs


def test_control_frames_by_hand():
    # symbols of 24 bits and 4 us after 20 us: (16 + 160 + 6) / 24 -> 8, (16 + 112 + 6) / 24 -> 6, 262 / 24 -> 11
    assert [control_frame_us(bits) for bits in (RTS_BITS, CTS_BITS, BACK_BITS)] == [52, 44, 64]


def test_one_exchange_by_hand():
    # 234 sub-carriers * 6 bits * 5/6 = 1170 bits a symbol; (16 + 12,352 + 6) / 1170 -> 11 of 16 us after 100 us;
    # control frames 160, three SIFS 48, DIFS 34, empty slot 9: in all 160 + 91 + 276 = 527 us
    assert Wifi().bits_per_symbol == 1170
    assert Wifi().airtime_s(320) == 527e-6
    assert Wifi().airtime_s(12_000) == 527e-6
    assert Wifi().airtime_s(12_001) > 527e-6
    assert Wifi().airtime_s(0) == 0


def test_as_many_mpdus_as_the_longest_ppdu_holds():
    # (5484 - 100) / 16 = 336 symbols: 336 * 1170 / 12,352 = 31.8; BPSK 1/2 has 117 bits a symbol: 3.18
    assert Wifi().mpdus_per_ppdu == 31
    assert Wifi(mcs=0).mpdus_per_ppdu == 3
    assert Wifi(aggregate=False).mpdus_per_ppdu == 1


def test_an_mlp_by_hand():
    # 4 PPDUs of 31 MPDUs, (22 + 31 * 12,352) / 1170 -> 328 symbols, 5348 us; one of 16, 169 symbols, 2804 us;
    # 5 * 251 + 4 * 5348 + 2804 = 25,451 us
    assert Wifi().airtime_s(MLP_BITS) == 25_451e-6
    assert MLP_BITS / Wifi().airtime_s(MLP_BITS) == pytest.approx(66.0e6, abs=0.05e6)


@pytest.mark.parametrize(
    ("wifi", "bits", "ms"),
    [
        (Wifi(), CNN_BITS, 35.641),
        (Wifi(mcs=0), MLP_BITS, 253.201),
        (Wifi(mcs=0), CNN_BITS, 354.542),
        (Wifi(aggregate=False), MLP_BITS, 73.780),
        (Wifi(aggregate=False), CNN_BITS, 103.292),
    ],
)
def test_airtime_of_models(wifi, bits, ms):
    assert wifi.airtime_s(bits) == pytest.approx(ms / 1e3, rel=1e-12)


def test_better_modulation_more_streams_and_wider_channels_are_faster():
    by_mcs = [Wifi(mcs).airtime_s(MLP_BITS) for mcs in range(len(MODULATIONS))]
    assert by_mcs == sorted(by_mcs, reverse=True)
    assert len(set(by_mcs)) == len(by_mcs)
    assert Wifi(streams=2).airtime_s(MLP_BITS) < Wifi().airtime_s(MLP_BITS)
    # 80 MHz: 980 * 5 = 4900 bits a symbol hold 133 MPDUs, but a block ack answers 64
    assert Wifi(channel_mhz=80).mpdus_per_ppdu == 64


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"mcs": 12}, "mcs is 12"), ({"channel_mhz": 30}, "channel_mhz is 30"), ({"streams": 0}, "streams is 0")],
)
def test_wifi_that_does_not_exist(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        Wifi(**wrong)


def test_radiated_joules_of_an_mlp():
    # 9 dBm = 10^0.9 mW = 7.943 mW up, 20 dBm = 100 mW down, 25.451 ms each: 0.202 + 2.545 = 2.747 mJ
    assert dbm_to_watts(9) == pytest.approx(7.943e-3, rel=1e-4)
    wifi = find_link("wifi")
    up, down = wifi.upload(210_000), wifi.download(210_000)
    assert up.seconds == down.seconds == 25_451e-6
    assert up.joules == pytest.approx(0.2022e-3, rel=1e-3)
    assert down.joules == pytest.approx(2.5451e-3, rel=1e-9)
    assert up.joules + down.joules == pytest.approx(2.747e-3, rel=1e-3)


def test_electronics_come_on_top():
    # 1 W both ways: 2 * 25.451 ms = 0.0509 J, and the radiated 0.0027 J; the link of that name is not changed
    powered = find_link("wifi", radio_w=1.0)
    assert powered.upload(210_000).joules + powered.download(210_000).joules == pytest.approx(
        0.050902 + 0.0027473, rel=1e-4
    )
    assert find_link("wifi").radio_w == 0


def test_links_by_rate():
    # 1,680,000 bits: at 375 kb/s 4.48 s, at 300 kb/s 5.6 s; 23 dBm = 0.1995 W on top of 0.5 W upwards only
    seconds, joules = find_link("lte-m").upload(210_000)
    assert seconds == pytest.approx(4.48)
    assert joules == pytest.approx(4.48 * 0.69953, rel=1e-4)
    assert find_link("lte-m").download(210_000) == pytest.approx((5.6, 2.8))
    assert find_link("lte-m", radio_w=0).download(210_000) == pytest.approx((5.6, 0.0))
    assert find_link("ethernet").upload(210_000) == pytest.approx((0.0168, 0.0168 * 0.3))


@pytest.mark.parametrize("name", LINKS)
def test_nothing_costs_nothing(name):
    assert find_link(name).upload(0) == find_link(name).download(0) == (0, 0)
    assert LINKS[name].name == name
    assert hash(find_link(name)) == hash(find_link(name))


def test_unknown_links():
    with pytest.raises(UserError, match=r"link 'wi-fi' is not known; did you mean wifi\? \(known: wifi, wifi-slow"):
        find_link("wi-fi")
    with pytest.raises(UserError, match="radio_w is -1"):
        find_link("wifi", radio_w=-1)
    with pytest.raises(UserError, match="radio_w is nan"):
        find_link("wifi", radio_w=float("nan"))


def test_training_on_a_pi():
    # 52,396 multiply-adds forward, thrice that with backward, 490 rows, 10 epochs: 1.540 GFLOP, 0.770 s, 3.85 J
    flops = 2 * 3 * 52_396 * 490 * 10
    seconds = flops / PROFILES["pi"].flops_per_s
    assert seconds == pytest.approx(0.770, abs=0.001)
    assert seconds * PROFILES["pi"].active_w == pytest.approx(3.85, abs=0.01)


def test_profiles_grow_from_small_to_large():
    ordered = [PROFILES[name] for name in ("microcontroller", "pi", "phone", "jetson", "server")]
    assert ordered == list(PROFILES.values())
    for small, large in pairwise(ordered):
        assert small.flops_per_s < large.flops_per_s
        assert small.memory_bytes < large.memory_bytes
    assert all(p.idle_w < p.active_w and p.source for p in ordered)


CLIENTS = [f"c{i}" for i in range(3000)]


def test_a_mix_follows_its_shares():
    # 3000 draws at 0.5: standard error 27; shares that do not add up to 1 are scaled
    for spec in ("pi:0.5,phone:0.3,jetson:0.2", " pi:5, phone:3 ,jetson:2"):
        counts = Counter(p.name for p in assign_profiles(spec, CLIENTS, seed=1).values())
        assert counts["pi"] == pytest.approx(1500, abs=120)
        assert counts["phone"] == pytest.approx(900, abs=120)
        assert counts["jetson"] == 3000 - counts["pi"] - counts["phone"]
    assert Counter(p.name for p in assign_profiles("pi,phone", CLIENTS, seed=1).values())["pi"] == pytest.approx(
        1500, abs=120
    )


def test_the_profile_of_a_client_does_not_depend_on_other_clients():
    mix = "pi:0.5,phone:0.5"
    profiles = assign_profiles(mix, CLIENTS, seed=3)
    assert assign_profiles(mix, CLIENTS[::-1], seed=3) == profiles
    assert assign_profiles(mix, ["c7"], seed=3)["c7"] == profiles["c7"]
    assert assign_profiles(mix, CLIENTS, seed=4) != profiles


def test_one_profile_for_all_clients_and_for_none():
    assert assign_profiles("jetson", ["a", "b"], seed=0) == {"a": PROFILES["jetson"], "b": PROFILES["jetson"]}
    assert assign_profiles("pi:0.2,phone:0.8", [], seed=0) == {}


BOARD = """
[board]
flops_per_s = 1e9
active_w = 3
idle_w = 1.5
memory_bytes = 536870912
source = "own measurement"

[short]
flops_per_s = 1e9

[wrong]
flops_per_s = 1e9
active_w = -3
idle_w = 1.5
memory_bytes = 536870912
"""


@pytest.fixture
def board(tmp_path):
    path = tmp_path / "boards.toml"
    path.write_text(BOARD)
    return path


def test_a_profile_of_the_user(board):
    own = Profile(f"{board}#board", 1e9, 3, 1.5, 2**29, "own measurement")
    assert find_profile(f"{board}#board") == own
    assert set(assign_profiles(f"pi:0.5,{board}#board:0.5", CLIENTS[:50], seed=0).values()) == {own, PROFILES["pi"]}


def test_wrong_profiles_of_the_user(board):
    with pytest.raises(UserError, match=r"boards.toml has no table \[bord\]. It has board, short, wrong"):
        find_profile(f"{board}#bord")
    with pytest.raises(UserError, match=r"\[short\] has no active_w, idle_w, memory_bytes"):
        find_profile(f"{board}#short")
    with pytest.raises(UserError, match=r"\[wrong\]: active_w is -3; it must be a number above 0"):
        find_profile(f"{board}#wrong")
    with pytest.raises(UserError, match=r"without a table, as in .*boards.toml#NAME. It has board, short, wrong"):
        find_profile(str(board))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        find_profile("nowhere.toml#board")
    board.write_text(BOARD.replace("idle_w", "idel_w"))
    with pytest.raises(UserError, match=r"\[board\]: idel_w is not known; did you mean idle_w\?"):
        find_profile(f"{board}#board")
    board.write_text("[board")
    with pytest.raises(UserError, match="is not TOML"):
        find_profile(f"{board}#board")


def test_the_facts_name_every_device_and_its_numbers(board):
    mixed = CostModel({"a": PROFILES["pi"], "b": find_profile(f"{board}#board")}, link=find_link("lte-m"))
    facts = json.loads(json.dumps(mixed.facts()))
    assert facts["clients"] == {"a": "pi", "b": f"{board}#board"}
    assert facts["devices"][f"{board}#board"] == {
        "flops_per_s": 1e9, "active_w": 3, "idle_w": 1.5, "memory_bytes": 2**29,
    }  # fmt: skip
    assert facts["link"]["up_channel"] == {"bits_per_s": 375e3}
    assert facts["server"]["active_w"] == 65


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("pie", r"device 'pie' is not known; did you mean pi\?"),
        ("", "device '' is not known"),
        ("pi:0", "the share '0' of pi is not a number above 0, as in pi:0.5"),
        ("pi:-1,phone", "the share '-1' of pi"),
        ("pi:half", "the share 'half' of pi"),
        ("pi:", "the share '' of pi"),
        ("pi:inf", "the share 'inf' of pi"),
        ("pi,", "device '' is not known"),
    ],
)
def test_wrong_mixes(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        assign_profiles(spec, ["a"], seed=0)


def test_the_page_of_devices_has_these_numbers():
    page = (Path(__file__).parents[3] / "docs/devices.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    tables = {row[0].removesuffix(" (default)").strip("`"): row[1:] for row in rows if len(row) >= 5}
    for p in PROFILES.values():
        assert tables[p.name] == [f"{p.flops_per_s:g}", f"{p.active_w:g}", f"{p.idle_w:g}", str(p.memory_bytes)]
    for name, row in LINKS.items():
        powers = (row.radiated_down_w, row.radiated_up_w, row.radio_w)
        assert tables[name][2:] == [f"{power:.4g}" for power in powers]
