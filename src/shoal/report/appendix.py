"""What a run's result says besides accuracy and cost: groups, what this machine drew, what noise protects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.report.cost_curves import PART_NAMES
from shoal.report.summary import duration, joules_text
from shoal.report.table import Sheet
from shoal.store.reader import RunRecord, run_labels

OF_CLIENTS = ("train", "pre", "comm")
MOST_NAMED = 12  # members of a group


def more_sheets(runs: Sequence[RunRecord]) -> list[Sheet]:
    """Those for which any run has something to say."""
    named = [(name, run.result) for name, run in zip(run_labels(runs), runs, strict=True) if run.result]
    sheets = (make(named) for make in (_groups, _group_joules, _measured, _privacy))
    return [sheet for sheet in sheets if sheet.rows]


Named = Sequence[tuple[str, Mapping[str, Any]]]


def _groups(named: Named) -> Sheet:
    rows = [
        (f"{name}\n{group['expert']}", str(len(group["clients"])), _some(group["clients"]))
        for name, result in named
        for group in result.get("groups", ())
    ]
    notes = [
        f"{name}: adjusted Rand index with the planted groups {result['groups_ari']:.2f}."
        for name, result in named
        if "groups" in result and "groups_ari" in result
    ]
    return Sheet("Groups", ("Run", "clients", "who"), tuple(rows), notes=tuple(notes))


def _some(clients: Sequence[str]) -> str:
    more = len(clients) - MOST_NAMED
    return ", ".join(clients[:MOST_NAMED]) + (f" ... and {more} more" if more > 0 else "")


def _group_joules(named: Named) -> Sheet:
    rows = [
        (f"{name}\ngroup {group}", str(found["clients"]), *(joules_text(found[part]) for part in OF_CLIENTS))
        for name, result in named
        for group, found in result.get("joules_of_groups", {}).items()
    ]
    heads = ("Run", "clients", *(PART_NAMES[part] for part in OF_CLIENTS))
    return Sheet("Joules of the groups that a method formed", heads, tuple(rows), notes=("Of clients, modelled.",))


def _measured(named: Named) -> Sheet:
    known = [(name, result["measured"]) for name, result in named if "measured" in result]
    rows = [
        (
            name,
            *(joules_text(m[k]) for k in ("joules", "cpu_joules", "ram_joules", "gpu_joules")),
            f"{1000 * m['kg_co2']:.3g} g",
            m["country"] or "world",
            duration(m["seconds"]),
        )
        for name, m in known
    ]
    sources = dict.fromkeys(m["source"] for _, m in known)
    heads = ("Run", "together", "processor", "memory", "GPU", "CO2", "electricity of", "time")
    notes = ("By CodeCarbon; the clients’ devices are another thing.", *(f"Processor: {s}." for s in sources))
    return Sheet("What this machine used to simulate", heads, tuple(rows), notes=notes)


def _privacy(named: Named) -> Sheet:
    known = [(name, dict(_flat(result["privacy"]))) for name, result in named if "privacy" in result]
    keys = list(dict.fromkeys(key for _, found in known for key in found))
    rows = [(name, *(_number(found.get(key)) for key in keys)) for name, found in known]
    notes = ["ε for one row (record) and for all of a client’s data (local), at this δ."]
    notes += ["ARI: groups with noise beside those without."] if "ari" in keys else []
    heads = ("Run", *(k.replace("_", " ") for k in keys))
    return Sheet("What noise protects", heads, tuple(rows), notes=tuple(notes))


def _flat(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key} ")
        else:
            yield f"{above}{key}", value


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
