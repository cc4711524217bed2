"""Measures the joules of a run on this machine with CodeCarbon, and the CO2 of a country's electricity.

Pereira, Famá, Kalalas, Dini, Energy-efficient federated learning for AIoT using clustering methods, 2025,
Sec. IV-A: E_pre + E_train, the sum over processor, GPU and memory of power times time.

Only CodeCarbon's offline tracker is used, and its access to the network is closed: it neither looks up a location or
prices nor sends a report, whatever CodeCarbon's own settings are.

The tracker counts the process with all its children, so that the workers of a pool count and other programs do not.
Counters of the processor (such as RAPL) count the whole machine; `EnergyMeasurement.source` says what was used. The
load is read once a second, so that the first and the last second of a worker may be missed.

Deviations from the paper
-------------------------
- The paper tracks the whole machine every 15 s, and this module tracks the process every second.
- The paper charges 0.375 W per GB of memory. CodeCarbon 3 charges about 5 W per memory module, and derives the number
  of modules from the size of the memory.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import TracebackType
from typing import Any

from shoal.errors import UserError

_JOULES_PER_KWH = 3.6e6

_CPU_SOURCES = {
    "intel_rapl": "measured by RAPL, for the whole processor",
    "intel_power_gadget": "measured by Intel Power Gadget, for the whole processor",
    "windows_emi": "measured by the Windows energy meter, for the whole processor",
    "cpu_load": "estimated, {tdp:g} W ({model}) times the share of all cores that this process and its children used",
    "constant": "estimated, half of {tdp:g} W ({model}) all the time",
}


@dataclass(frozen=True)
class EnergyMeasurement:
    """The measured joules of a run, and the CO2 of its electricity."""

    seconds: float
    joules: float
    cpu_joules: float
    ram_joules: float
    gpu_joules: float
    kg_co2: float
    country: str | None  # code of three letters; None for the average of the world
    source: str  # how the joules of the processor were measured or estimated


class Carbon:
    """Measures the joules of a block: `with Carbon("ESP") as carbon: ...`, then read `carbon.measurement`.

    The first measurement of a process starts slowly, because it imports CodeCarbon.

    Parameters
    ----------
    country : str or None
        Code or English name of the country whose electricity is used. None: the average of the world.

    Raises
    ------
    UserError
        If CodeCarbon is not installed, does not know the country, or does not work on this machine.
    """

    measurement: EnergyMeasurement

    def __init__(self, country: str | None = None) -> None:
        if importlib.util.find_spec("codecarbon") is None:
            raise UserError("Measuring joules needs CodeCarbon, which is not installed: pip install codecarbon")
        self._country = None if country is None else _country_code(country)

    def __enter__(self) -> Carbon:
        self._tracker = _make_tracker(self._country)
        self._tracker.start()
        if not self._tracker._hardware:  # start() hides its errors
            raise UserError("Joules cannot be measured here, because CodeCarbon does not start. Run without measuring.")
        self._source = _describe_source(self._tracker._hardware)
        self._start_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start_s  # CodeCarbon's own duration includes its shutdown, up to a second
        self._tracker.stop()
        emissions = self._tracker.final_emissions_data
        self.measurement = EnergyMeasurement(
            seconds=seconds,
            joules=emissions.energy_consumed * _JOULES_PER_KWH,
            cpu_joules=emissions.cpu_energy * _JOULES_PER_KWH,
            ram_joules=emissions.ram_energy * _JOULES_PER_KWH,
            gpu_joules=emissions.gpu_energy * _JOULES_PER_KWH,
            kg_co2=emissions.emissions,
            country=self._country,
            source=self._source,
        )


def split_joules(measurement: EnergyMeasurement, seconds_by_part: Mapping[str, float]) -> dict[str, float]:
    """Returns the joules of each part in proportion to its time, or zeros if no time was measured."""
    total = sum(seconds_by_part.values())
    if total <= 0:
        return dict.fromkeys(seconds_by_part, 0.0)
    return {part: measurement.joules * seconds / total for part, seconds in seconds_by_part.items()}


def _country_code(country: str) -> str:
    path = files("codecarbon") / "data" / "private_infra" / "global_energy_mix.json"
    names = {code: entry["country_name"] for code, entry in json.loads(path.read_text()).items()}
    code = country.upper()
    if code in names:
        return code
    by_name = {name.lower(): code for code, name in names.items()}
    near = difflib.get_close_matches(country.lower(), by_name, n=1) or difflib.get_close_matches(code, names, n=1)
    hint = f"; did you mean {by_name.get(near[0], near[0])}?" if near else ""
    raise UserError(
        f"country {country!r} is not a country code of three letters such as ESP that CodeCarbon knows{hint}"
    )


def _make_tracker(country: str | None) -> Any:
    from codecarbon import OfflineEmissionsTracker  # slow to import

    logging.getLogger("codecarbon").setLevel(logging.ERROR)  # its own log_level comes too late for its first lines
    return OfflineEmissionsTracker(
        country_iso_code=country,
        region=None,
        country_2letter_iso_code=None,
        cloud_provider=None,
        cloud_region=None,
        output_methods=[],
        emissions_endpoint=None,
        electricitymaps_api_token="",  # with None, CodeCarbon would use its own setting
        tracking_mode="process",
        measure_power_secs=1,
        allow_multiple_runs=True,
        log_level="error",
    )


def _describe_source(hardware: list[Any]) -> str:
    for part in hardware:
        if type(part).__name__ == "CPU":
            return _CPU_SOURCES[part._mode].format(tdp=part._tdp, model=part._model)
        if getattr(part, "chip_part", None) == "CPU":
            meter = "powermetrics" if type(part).__name__ == "AppleSiliconChip" else "the board's own meter"
            return f"measured by {meter}, for the whole processor"
    return "unknown"
