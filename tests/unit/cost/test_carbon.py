"""The installed CodeCarbon on this machine, without a network."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from shoal.cost.carbon import Carbon, EnergyMeasurement, split_joules
from shoal.errors import UserError

codecarbon = pytest.importorskip("codecarbon")

WORK = """
import sys, time
print("ready", flush=True)
sys.stdin.readline()
while time.process_time() < 1.5:
    sum(range(1000))
print(time.process_time(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def calls(monkeypatch):
    """Every attempt to reach the network, which fails."""
    attempts: list[tuple[object, ...]] = []

    def refuse(*arguments: object, **_: object) -> None:
        attempts.append(arguments)
        raise OSError("no network in this test")

    for owner, name in (
        *((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket.socket, "sendto")),
        *((socket, "getaddrinfo"), (socket, "gethostbyname"), (socket, "create_connection")),
    ):
        monkeypatch.setattr(owner, name, refuse)
    return attempts


@pytest.fixture
def settings_that_ask_for_the_network(monkeypatch):
    for name, value in {
        "SAVE_TO_API": "true",
        "OUTPUT_METHODS": "api,prometheus",
        "EMISSIONS_ENDPOINT": "http://example.org",
        "ELECTRICITYMAPS_API_TOKEN": "token",
        "CO2_SIGNAL_API_TOKEN": "token",
        "CLOUD_PROVIDER": "aws",
        "CLOUD_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(f"CODECARBON_{name}", value)


@pytest.fixture
def worker():
    """A child process that works for 1.5 s of processor time after a line of input."""
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        yield child
        child.stdin.close()


def start_work(child) -> float:
    child.stdin.write("go\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def test_children_are_counted_and_nothing_is_sent(
    calls, settings_that_ask_for_the_network, worker, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    with Carbon("esp") as carbon:
        cpu_s = start_work(worker)
    m = carbon.measurement
    assert calls == []
    assert list(tmp_path.iterdir()) == []  # no emissions.csv
    assert capfd.readouterr() == ("", "")
    assert m.joules == pytest.approx(m.cpu_joules + m.ram_joules + m.gpu_joules)
    assert m.seconds >= cpu_s - 0.1
    assert m.ram_joules > 0
    # grams of CO2 for each kWh of Spanish electricity, from CodeCarbon's own table: between 100 and 300
    assert 0.1 < m.kg_co2 / (m.joules / 3.6e6) < 0.3
    assert m.country == "ESP"
    cpu = next(part for part in carbon._tracker._hardware if type(part).__name__ == "CPU")
    if cpu._mode == "cpu_load":
        # watts * share of all cores * seconds = watts * processor time / cores; this process itself did little
        child_joules = cpu._tdp * cpu_s / cpu._cpu_count
        assert m.cpu_joules == pytest.approx(child_joules, rel=0.15)
        assert m.source.startswith(f"estimated, {cpu._tdp:g} W (")
        assert "this process and its children" in m.source
    else:
        assert m.source.startswith("measured by")
        assert m.cpu_joules > 0


def test_without_a_country_the_average_of_the_world_counts(calls):
    with Carbon() as carbon:
        sum(range(10**6))
    assert carbon.measurement.country is None
    # CodeCarbon's average of the world, 475 g for each kWh
    assert carbon.measurement.kg_co2 == pytest.approx(carbon.measurement.joules / 3.6e6 * 0.475, rel=1e-6)
    assert calls == []


def test_an_error_in_the_measured_block_is_raised():
    carbon = Carbon()
    with pytest.raises(ZeroDivisionError), carbon:
        1 / 0  # noqa: B018
    assert carbon.measurement.seconds >= 0


@pytest.mark.parametrize(
    ("country", "hint"), [("XYZ", ""), ("spain", "did you mean ESP"), ("DEUU", "did you mean DEU")]
)
def test_unknown_countries(country, hint, calls):
    with pytest.raises(UserError, match=f"country '{country}' is not a country code of three letters.*{hint}"):
        Carbon(country)
    assert calls == []


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with pytest.raises(UserError, match="needs CodeCarbon, which is not installed: pip install"):
        Carbon("ESP")


def test_joules_are_split_by_time():
    m = EnergyMeasurement(10.0, 60.0, 40.0, 20.0, 0.0, 1e-5, None, "")
    # 1 : 2 : 0 of 60 J; the parts need not fill the whole time
    assert split_joules(m, {"preparation": 1.0, "training": 2.0, "communication": 0.0}) == pytest.approx(
        {"preparation": 20.0, "training": 40.0, "communication": 0.0}
    )
    assert split_joules(m, {"preparation": 0.0}) == {"preparation": 0.0}
    assert split_joules(m, {}) == {}
